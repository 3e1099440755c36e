"""All problems and all optimizers, by the names that the command line and the log have for them."""

from benchmarks.untuned.choice import CHOICE
from benchmarks.untuned.held_out import HELD_OUT
from benchmarks.untuned.ours import OURS
from benchmarks.untuned.peers import PEERS
from benchmarks.untuned.wide import WIDE

SETS = {"choice": CHOICE, "held-out": HELD_OUT}
PROBLEMS = {**CHOICE, **HELD_OUT, **WIDE}
ENTRIES = {**PEERS, **OURS}
