"""Peak memory of a step above what network, minibatch and state take."""

from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.gpu import steps
from benchmarks.gpu.place import Place
from benchmarks.memory import held_bytes, peak_of
from benchmarks.report import MB
from benchmarks.turns import first_line


def measure(place: Place) -> dict[str, Any]:
    """By problem and optimizer: bytes of its state, and of the peak of its first two steps and one that is due."""
    found: dict[str, dict[str, dict[str, int | None]]] = {}
    for problem in place.problems:
        found[problem] = {}
        for name in steps.NAMES:
            try:
                found[problem][name] = _of(place, problem, name)
            except Exception as error:
                place.failures.append(f"{problem}, {name}: {first_line(error)}")
    return found


def _of(place: Place, problem: str, name: str) -> dict[str, int | None]:
    setup = place.set_up(problem)
    peak = peak_of(place.device)
    ready = CONTENDERS[name].build(setup)
    for kind in steps.kinds(ready):
        ready.steps[kind]()
    return {"peak": peak(), "state": held_bytes(ready.holds, setup)}


def render(found: dict[str, Any]) -> str:
    return steps.table("peak above network and minibatch, of it state, MB", found, _text)


def _text(row: dict[str, int | None]) -> str:
    return ", ".join("?" if row[what] is None else f"{row[what] / MB:.1f}" for what in ("peak", "state"))
