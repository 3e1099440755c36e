"""Grids that run as they are, whatever is found.

A cell is an object with a problem, an optimizer, a setting, and labels that tables go by.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.untuned import scores, study
from benchmarks.untuned.lists import ENTRIES, PROBLEMS
from benchmarks.untuned.log import Trial
from benchmarks.untuned.protocol import loss
from benchmarks.untuned.report import short
from benchmarks.untuned.training import finite

Cell = dict[str, Any]
UNTUNED = ("onepass", "onepass-kfac", "kbfgs", "kbfgsl", "kfac-untuned")
_QUICK_STEPS = 2


def parser(doc: str | None, name: str, optimizers: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what all grids can be told; an optimizer is one without a grid of its own, or a default one."""
    parser = study.parser(doc, name)
    choices = dict.fromkeys([*(each for each, entry in ENTRIES.items() if not entry.is_tuned), *optimizers])
    parser.add_argument("--optimizers", nargs="+", choices=choices, default=list(optimizers), help="which ones")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=200)
    return parser


def run(args: argparse.Namespace, command: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Run each cell with each seed.

    Returns:
        A JSON object. Its ``cells`` are those that have run, each with its ``losses`` by seed and the ``error`` where
        there is one. A loss is None where the run diverged or broke off.
    """
    steps = _QUICK_STEPS if args.quick else args.steps
    rows = [
        [Trial(cell["problem"], cell["optimizer"], cell["setting"], steps, seed) for seed in args.seeds]
        for cell in cells
    ]
    problems = dict.fromkeys(cell["problem"] for cell in cells)
    work = study.fixed([PROBLEMS[name] for name in problems], [trial for row in rows for trial in row])
    found = study.run(args, work)
    records = [[found[trial.key] for trial in row if trial.key in found] for row in rows]
    return {
        **study.results(args, command, work.mine(found)),
        "steps": steps,
        "seeds": args.seeds,
        "problems": {name: PROBLEMS[name].title for name in problems},
        "optimizers": {name: ENTRIES[name].title for name in args.optimizers},
        "cells": [{**cell, **_outcome(row)} for cell, row in zip(cells, records, strict=True) if row],
    }


def _outcome(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "losses": [finite(loss(record)) for record in records],
        "error": next((record["error"] for record in records if record["error"]), None),
    }


def rounded(value: float) -> float:
    """A third of a rate as it is typed."""
    return float(f"{value:.3g}")


def of(cells: Sequence[Cell], **labels: object) -> list[Cell]:
    """The cells with these labels."""
    return [cell for cell in cells if all(cell[name] == value for name, value in labels.items())]


def mean(cell: Cell) -> float:
    """Over seeds; infinite where one fails."""
    return scores.mean(cell["losses"])


def best(cells: Sequence[Cell]) -> Cell | None:
    """The one with the lowest loss, of those that do not fail."""
    return min((cell for cell in cells if math.isfinite(mean(cell))), key=mean, default=None)


def text(cells: Sequence[Cell]) -> str:
    """The loss of the one cell; nothing where it has not run."""
    return short(mean(cells[0])) if cells else ""


def ratio(cells: Sequence[Cell], others: Sequence[Cell]) -> str:
    """The loss of the one cell in multiples of the best of others; nothing where it has not run."""
    return short(scores.ratio(mean(cells[0]), min(map(mean, others)))) if cells else ""
