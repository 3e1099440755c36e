"""Measured costs beside the formulas, as Markdown."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from examples.paper.page import markdown
from examples.paper.sources import kind_of
from workloads import environment, records
from workloads.cost_formulas import STATE_PARTS, TIME_PARTS
from workloads.methods import METHODS


def is_costs(path: Path) -> bool:
    """Whether a file was written by ``costs``."""
    return path.is_file() and kind_of(path) == "costs"


def render_costs(path: Path) -> str:
    """A section of the page."""
    lines = records.read(path)
    blocks = ["## Costs (`table_4`, `table_5`)"]
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in lines:
        # A later line about the same method replaces an earlier one.
        groups.setdefault(_conditions(line), {})[line["method"]] = line
    for rows in groups.values():
        blocks += _workload(list(rows.values()), len({line["environment"]["device"] for line in lines}) > 1)
    blocks += [f"* command: `{command}`" for command in dict.fromkeys(line["command"] for line in lines)]
    environments = dict.fromkeys(json.dumps(line["environment"], sort_keys=True) for line in lines)
    blocks += [f"* {environment.one_line(json.loads(text))}" for text in environments]
    return "\n\n".join(blocks)


def _conditions(line: dict[str, Any]) -> tuple[Any, ...]:
    """What costs must have in common to be compared."""
    return line["workload"], line["batch_size"], line["steps"], line["environment"]["device"]


def _workload(rows: list[dict[str, Any]], tell_device: bool) -> list[str]:
    name, batch_size, steps, device = _conditions(rows[0])
    parts = [
        name,
        f"minibatches of {batch_size}",
        f"{steps} whole iterations" if steps else "",
        device if tell_device else "",
    ]
    return [
        f"### {', '.join(filter(None, parts))}",
        "State, MB: measured (the paper's formula, 4 bytes a number)",
        markdown(pd.DataFrame([_state_row(row) for row in rows])),
        "Time of an iteration, ms: measured (the paper's formula, 10⁶ multiplications). "
        "What is not done in every iteration is divided by how often it is.",
        markdown(pd.DataFrame([_time_row(row) for row in rows])),
        *_ratios(rows),
    ]


def _state_row(row: dict[str, Any]) -> dict[str, str]:
    parts = {part: _cell(row["state"][part] / 1e6, row["state_formula"][part] * 4 / 1e6) for part in STATE_PARTS}
    total = sum(row["state"].values()) / 1e6, sum(row["state_formula"].values()) * 4 / 1e6
    return {"method": METHODS[row["method"]].title, **parts, "total": _cell(*total)}


def _time_row(row: dict[str, Any]) -> dict[str, str]:
    parts = {part: _cell(row["seconds"][part] * 1e3, row["multiplications"][part] / 1e6) for part in TIME_PARTS}
    total = sum(row["seconds"].values()) * 1e3, sum(row["multiplications"].values()) / 1e6
    return {"method": METHODS[row["method"]].title, "T": _frequency(row), **parts, "total": _cell(*total)}


def _frequency(row: dict[str, Any]) -> str:
    if METHODS[row["method"]].first_order:
        return ""
    return f"{row['T1']}, {row['T']}" if METHODS[row["method"]].is_kfac else str(row["T"])


def _ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Whole iterations, as multiples of SGD-m's."""
    measured = {row["method"]: row["iteration"] for row in rows if row["iteration"] is not None}
    if not measured:
        return []
    base = measured.get("sgdm")
    table = [
        {
            "method": METHODS[method].title,
            "ms": f"{seconds * 1e3:.3g}",
            "÷ SGD-m": "" if base is None else f"{seconds / base:.2f}",
        }
        for method, seconds in measured.items()
    ]
    return [f"Whole iterations, mean of {rows[0]['steps']}:", markdown(pd.DataFrame(table))]


def _cell(measured: float, formula: float) -> str:
    return "–" if measured == formula == 0 else f"{_short(measured)} ({_short(formula)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
