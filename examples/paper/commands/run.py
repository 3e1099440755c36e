"""``run``: train one method on one problem, once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from examples.paper.cell import Cell, Frequency
from examples.paper.commands.budget import Budget
from examples.paper.commands.machine import Machine
from examples.paper.defaults import best, make_cell
from examples.paper.progress import Bar, sentence
from examples.paper.run import run as run_cell
from workloads import environment
from workloads.methods import METHODS
from workloads.problems import PROBLEMS
from workloads.records import Refused

ProblemName = Literal[tuple(PROBLEMS)]  # type: ignore[valid-type]
MethodName = Literal[tuple(METHODS)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class Run:
    """Train one method on one problem, once.

    Example: python -m examples.paper run --problem digits --method kbfgs --best --epochs 20 --out runs/digits.jsonl
    """

    problem: ProblemName
    """The problem."""
    method: MethodName
    """The method."""
    out: Path
    """File of JSON lines: a header, a line an epoch, a line that says how it ended."""
    best: bool = False
    """Take the paper's best values for all hyperparameters that are not given."""
    lr: float | None = None
    """α."""
    damping: float | None = None
    """λ; Adam's ε."""
    weight_decay: float | None = None
    """γ: W ← W - α(p + γW)."""
    update_freq: Frequency | None = None
    """T, for KFAC T₂: curvature is updated every so many iterations. geometric: min(20, max(1, k // 20))."""
    stats_update_freq: int | None = None
    """KFAC's T₁."""
    seed: int = 0
    """Decides initialization, order of the data, and all else that is random."""
    resume: bool = False
    """Go on from the checkpoint beside OUT, if there is one."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints, which are taken after an epoch."""
    keep_checkpoint: bool = False
    """Leave a checkpoint of the end, from which a longer run can --resume."""
    tensorboard: Path | None = None
    """Also log to this directory for TensorBoard."""
    budget: Annotated[Budget, tyro.conf.arg(name="")] = Budget()
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()

    def cell(self) -> Cell:
        names = ("lr", "damping", "weight_decay", "update_freq", "stats_update_freq", "seed")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        values = (best(self.problem, self.method) if self.best else {}) | values | self.budget.fields()
        if "lr" not in values:
            raise SystemExit("Give --lr (and --damping), or --best for the paper's values.")
        return make_cell(self.problem, self.method, values)

    def main(self) -> None:
        try:
            cell = self.cell()
        except (KeyError, ValueError) as error:
            raise SystemExit(error.args[0]) from None
        device, threads = self.machine.torch_device(), self.machine.threads_for(1)
        data = self.machine.load(cell.problem)
        environment.prepare(threads)
        with Bar(cell) as bar:
            try:
                lines = run_cell(
                    cell,
                    data,
                    self.out,
                    device=device,
                    resume=self.resume,
                    watch=bar,
                    checkpoint_every=self.checkpoint_every,
                    keep_checkpoint=self.keep_checkpoint,
                    on_record=self._on_record(),
                )
            except Refused as error:
                raise SystemExit(str(error)) from None
        print(sentence(lines))

    def _on_record(self) -> Callable[[dict[str, Any]], None]:
        if self.tensorboard is None:
            return lambda record: None
        from examples.paper.tensorboard import Writer

        return Writer(self.tensorboard)
