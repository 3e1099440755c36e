"""Both sets of problems in one table, and tables without rows of blanks."""

from typing import Any

from benchmarks.untuned import report, summary

TITLES = {"adam": "Adam", "soap": "SOAP", "o": "O"}


def cell(problem: str, optimizer: str, loss: float, in_seconds: list[float] | None = None) -> dict[str, Any]:
    numbers = {"losses": [loss], "valid": [loss], "at_seconds": [loss], "in_seconds": in_seconds, "seconds": 1.0}
    place = {"problem": problem, "optimizer": optimizer, "steps": 2}
    return {**place, **numbers, "setting": {}, "is_end": False, "error": None}


def results(*cells: dict[str, Any]) -> dict[str, Any]:
    problems = {each["problem"]: each["problem"].upper() for each in cells}
    shared = {"quick": False, "lengths": [2], "seeds": [0], "optimizers": TITLES, "command": "c"}
    cost = {"runs": 1, "seconds": 60.0, "wall": 60.0}
    return {**shared, "cost": cost, "problems": problems, "cells": list(cells)}


ONE = results(cell("p", "adam", 4.0), cell("p", "soap", 2.0), cell("p", "o", 2.4, [3.0]))
TWO = results(cell("q", "adam", 1.0), cell("q", "soap", 2.0), cell("q", "o", 6.0))


def test_counts_are_over_the_problems_of_both_sets() -> None:
    text = summary.render([ONE, TWO])
    assert "| O | 1 of 2 | 1 of 2 | 2.1 |" in text and "| SOAP | 1 of 2 | 2 of 2 | 1 |" in text
    assert "2 problems, mean losses of 1 seeds." in text


def test_an_optimizer_without_an_entry_has_no_row() -> None:
    shorter = report.render(ONE).split("The same of shorter runs")[1].split("Loss on validation")[0]
    assert "| O | 3 |" in shorter and "SOAP" not in shorter and "Adam |" not in shorter
    assert report.render(ONE).count("| SOAP |") == 3  # counts, losses, validation
