"""One problem: times of steps, memory, and times of extraction, as what the JSON file keeps."""

import statistics
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks import memory
from benchmarks.contenders import CONTENDERS
from benchmarks.extraction import EXTRACTIONS, PLAIN
from benchmarks.problems import PROBLEMS, QUICK, set_up
from benchmarks.turns import Run, Times, first_line, interleave

BASE = "sgdm"
_BASE_STEP = f"{BASE}: ordinary"


def measure(problem: str, contenders: Iterable[str], turns: int, quick: bool, device: torch.device) -> dict[str, Any]:
    """Measure one problem.

    Args:
        problem: Its name.
        contenders: Their names; SGD-m always runs.
        turns: How often everything runs that is not too slow for it.
        quick: A small network of the same kind instead.
        device: Where.

    Returns:
        A JSON object.
    """
    workload = (QUICK if quick else PROBLEMS)[problem]
    names = list(dict.fromkeys([BASE, *contenders]))
    # First: processes that start while this one holds little.
    memories = {name: memory.measure(name, problem, quick, str(device)) for name in names}
    times, errors = steps(problem, names, turns, quick, device)
    return {
        "title": workload.name,
        "batch_size": workload.batch_size,
        "turns": turns,
        "step_seconds": times.base_seconds(_BASE_STEP),
        "rows": [row for name in names for row in _rows(name, times, errors, memories[name])],
        "steps": {name: _quartiles(ratios) for name, ratios in times.ratios.items() if ratios},
        "extraction": extraction(problem, EXTRACTIONS, turns, quick, device),
    }


def steps(
    problem: str, names: Iterable[str], turns: int, quick: bool, device: torch.device
) -> tuple[Times, dict[str, str]]:
    """Time every kind of step of every contender, beside SGD-m's; and say why a contender could not be built."""
    runs: dict[str, Run] = {}
    before: dict[str, Run] = {}  # in training, the step before was the same optimizer's
    errors: dict[str, str] = {}
    for name in names:
        contender = CONTENDERS[name]
        try:
            ready = contender.build(set_up((QUICK if quick else PROBLEMS)[problem], device))
        except Exception as error:
            errors[name] = first_line(error)
            continue
        runs |= {f"{name}: {kind}": ready.steps[kind] for kind in contender.kinds}
        before |= {f"{name}: {kind}": ready.steps["ordinary"] for kind in contender.kinds}
    return interleave(runs, _BASE_STEP, turns, device, before), errors


def mean_steps(name: str, times: Times) -> dict[str, float]:
    """A contender's rows: the time of a mean step, in steps of SGD-m. Rows with a kind that failed are missing."""
    found: dict[str, float] = {}
    for title, shares in CONTENDERS[name].rows.items():
        if all(times.ratios.get(f"{name}: {kind}") for kind in shares):
            found[title] = sum(share * times.median(f"{name}: {kind}") for kind, share in shares.items())
    return found


def extraction(
    problem: str, names: Iterable[str], turns: int, quick: bool, device: torch.device
) -> dict[str, float | str]:
    """Forward-backward passes that give curvature quantities too, in plain ones, or why there is no such pass."""
    runs: dict[str, Run] = {}
    found: dict[str, float | str] = {}
    for name in dict.fromkeys([PLAIN, *names]):
        try:
            runs[name] = EXTRACTIONS[name](set_up((QUICK if quick else PROBLEMS)[problem], device))
        except Exception as error:
            found[name] = first_line(error)
    times = interleave(runs, PLAIN, turns, device)
    return found | {name: times.errors.get(name) or times.median(name) for name in runs if name != PLAIN}


def _rows(name: str, times: Times, errors: dict[str, str], used: memory.Memory | str) -> list[dict[str, Any]]:
    measured = mean_steps(name, times)
    failures = {f"{name}: {kind}" for kind in CONTENDERS[name].kinds} & set(times.errors)
    error = errors.get(name) or next((times.errors[kind] for kind in failures), None)
    peak, state = (None, None) if isinstance(used, str) else (used.peak, used.state)
    if error is None and isinstance(used, str):
        error = used
    titles = CONTENDERS[name].rows if measured else [name]
    return [
        {"row": title, "time": measured.get(title), "peak": peak, "state": state, "error": error} for title in titles
    ]


def _quartiles(ratios: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return {"low": low, "median": median, "high": high, "runs": len(ratios)}
