"""Both sets of problems in one table and one figure, from the results of each."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import markdown
from benchmarks.untuned import report
from benchmarks.untuned.report import Results


def joined(sets: Sequence[Results]) -> Results:
    """Results as if all problems were one set's."""
    first, *_ = sets
    problems = {name: title for results in sets for name, title in results["problems"].items()}
    return {**first, "problems": problems, "cells": [cell for results in sets for cell in results["cells"]]}


def render(sets: Sequence[Results]) -> str:
    """On how many of all problems an optimizer is ahead of tuned peers, in as many steps."""
    results = joined(sets)
    tables = [report.losses(results, steps, "losses") for steps in results["lengths"]]
    head = [f"{steps} steps: {what}" for steps in results["lengths"] for what in ("below Adam", "≤ 1.3", "median")]
    rows = [["", *head]]
    for name, title in results["optimizers"].items():
        cells = [text for table in tables for text in (report.count(table, name), *report.ahead(table, name)[:2])]
        rows.append([title, *cells])
    note = (
        f"{len(results['problems'])} problems, mean losses of {len(results['seeds'])} seeds. Below Adam: than that at "
        "its best of five rates. ≤ 1.3, and median: of the loss ÷ that of the better of tuned SOAP and Muon. "
        "`python -m benchmarks.untuned.pages` prints this."
    )
    return f"{markdown(rows)}\n\n{note}"


def draw(sets: Sequence[Results], path: Path) -> None:
    """Draw performance profiles over all problems, in as many steps."""
    report.draw(joined(sets), path, ("losses",))
