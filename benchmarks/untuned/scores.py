"""Scores of finished runs: losses of tuned settings after all steps, and after the seconds that tuned Adam took."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.untuned.entry import Entry
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.protocol import BASE, Protocol, loss
from workloads.records import Record

Cell = dict[str, Any]
Curve = Sequence[tuple[int, float, float | None]]


def cells(problems: Sequence[str], entries: Mapping[str, Entry], protocol: Protocol, found: Found) -> list[Cell]:
    """One for each length, problem and optimizer of which a setting was chosen, or which does not run.

    Returns:
        JSON objects: ``setting``, whether it ``is_end`` of its grid, and by seed ``losses``, ``at_seconds``,
        ``in_seconds``, ``valid``, where None stands for a run that diverged or broke off; mean ``seconds``; and the
        ``error`` where there is one.
    """
    made: list[Cell] = []
    for steps in protocol.lengths:
        for problem in problems:
            row = {name: _cell(problem, name, entry, steps, protocol, found) for name, entry in entries.items()}
            budgets = {r["seed"]: r["seconds"] for r in row[BASE]["records"]} if row.get(BASE) else {}
            for cell in row.values():
                if cell is not None:
                    timed = [at_seconds(r, budgets[r["seed"]]) for r in cell.pop("records") if r["seed"] in budgets]
                    made.append({**cell, "at_seconds": timed or None})
    return made


def _cell(problem: str, name: str, entry: Entry, steps: int, protocol: Protocol, found: Found) -> Cell | None:
    best = protocol.best(problem, name, entry, steps, found)
    if best is None:
        return None
    runs = [Trial(problem, name, best, steps, seed).key for seed in protocol.seeds]
    records = [found[key] for key in runs if key in found]
    return {
        "problem": problem,
        "optimizer": name,
        "steps": steps,
        "setting": dict(best),
        "is_end": entry.is_tuned and best in (entry.grid[0], entry.grid[-1]),
        "losses": [_or_none(loss(record)) for record in records],
        "valid": [None if math.isinf(loss(record)) else record["valid"] for record in records],
        "in_seconds": _in_seconds(problem, name, entry, steps, protocol, found),
        "seconds": fmean(record["seconds"] for record in records),
        "error": next((record["error"] for record in records if record["error"]), None),
        "records": records,
    }


def _in_seconds(
    problem: str, name: str, entry: Entry, steps: int, protocol: Protocol, found: Found
) -> list[float | None] | None:
    """Losses of the shorter runs that take Adam's seconds; None where there are none."""
    if entry.is_tuned:
        return None
    runs = [protocol.in_seconds(problem, name, steps, seed, found) for seed in protocol.seeds]
    return None if any(run is None for run in runs) else [_or_none(loss(run)) for run in runs if run is not None]


def at_seconds(record: Record, seconds: float) -> float | None:
    """Loss that a run had reached by then; None where it diverged or broke off."""
    return None if math.isinf(loss(record)) else _or_none(reached(record["curve"], seconds))


def reached(curve: Curve, seconds: float) -> float:
    """Loss of a curve at a time, between its points on the straight line; after its end, the end's."""
    times = [time for _, time, _ in curve]
    values = [math.inf if value is None else value for _, _, value in curve]
    after = bisect_right(times, seconds)
    if after == 0:
        return values[0]
    if after == len(curve):
        return values[-1]
    share = (seconds - times[after - 1]) / (times[after] - times[after - 1])
    return (1 - share) * values[after - 1] + share * values[after] if share else values[after - 1]


def mean(losses: Sequence[float | None]) -> float:
    """Mean over seeds, infinite where one of them failed."""
    return math.inf if not losses or any(value is None for value in losses) else fmean(losses)


def better(losses: Mapping[str, float], other: Mapping[str, float]) -> tuple[int, int]:
    """On how many problems a loss is lower than another optimizer's, and of how many."""
    both = [problem for problem in losses if problem in other]
    return sum(losses[problem] < other[problem] for problem in both), len(both)


def ratios(losses: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> list[float]:
    """Losses divided by the best of others', in ascending order, of the problems that one of them was run on."""
    best = {problem: min(other.get(problem, math.inf) for other in others) for problem in losses} if others else {}
    return sorted(ratio(losses[problem], value) for problem, value in best.items() if math.isfinite(value))


def profile(losses: Mapping[str, Mapping[str, float]], name: str) -> list[float]:
    """Losses of an optimizer in multiples of the best of all, in ascending order; infinite where it failed."""
    problems = dict.fromkeys(problem for row in losses.values() for problem in row)
    best = {problem: min(row.get(problem, math.inf) for row in losses.values()) for problem in problems}
    return sorted(ratio(losses[name].get(problem, math.inf), best[problem]) for problem in problems)


def ratio(value: float, best: float) -> float:
    """Infinite where the value is, or nothing can be a multiple of the best."""
    return value / best if math.isfinite(value) and best > 0 else math.inf


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
