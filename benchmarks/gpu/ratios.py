"""Steps in steps of SGD with momentum, in turns."""

from statistics import median
from typing import Any

from benchmarks.gpu import steps
from benchmarks.gpu.place import Place

_BASE = "sgdm"


def measure(place: Place) -> dict[str, Any]:
    """By problem: milliseconds of SGD-m's step, and of each row its ratio to that."""
    return {problem: _of_problem(place, problem) for problem in place.problems}


def _of_problem(place: Place, problem: str) -> dict[str, Any]:
    built = list(steps.each(place, problem))
    times: dict[str, list[float]] = {}
    for _ in range(place.turns):
        for name, contender, ready in built:
            for kind in contender.kinds:
                ready.steps["ordinary"]()  # as in training, the step before is the same optimizer's
                times.setdefault(f"{name}: {kind}", []).append(place.milliseconds(ready.steps[kind]))
    means = {name: median(values) for name, values in times.items()}
    base = means[f"{_BASE}: ordinary"]
    rows = {
        title: sum(share * means[f"{name}: {kind}"] for kind, share in shares.items()) / base
        for name, contender, _ in built
        for title, shares in contender.rows.items()
    }
    return {"base": base, "rows": rows}


def render(found: dict[str, Any]) -> str:
    base = ", ".join(f"{problem['base']:.2f} on {name}" for name, problem in found.items())
    rows = {name: problem["rows"] for name, problem in found.items()}
    return f"Milliseconds of SGD-m's step: {base}.\n\n" + steps.table("step ÷ SGD-m's", rows, "{:.2f}".format)
