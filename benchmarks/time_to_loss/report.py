"""The results as tables: a row an optimizer, the fastest to the last loss first."""

import math
from statistics import median
from typing import Any

from benchmarks.report import markdown

_LONGEST_ERROR = 60


def render(results: dict[str, Any]) -> str:
    """A table a problem."""
    blocks = ["On small data and in few seconds, to see that it runs."] if results["quick"] else []
    for problem in results["problems"].values():
        seeds = min(len(row["seeds"]) for row in problem["rows"].values())
        blocks += [f"**{problem['title']}**, {problem['seconds']:g} s a run, {seeds} seed(s):", _table(problem)]
    return "\n\n".join(blocks)


def _table(problem: dict[str, Any]) -> str:
    losses = [f"{loss:g}" for loss in problem["losses"]]
    head = ["seconds to a loss of", *losses, "last loss", "steps", "setting"]
    rows = sorted(problem["rows"].items(), key=lambda item: _order(item[1]))
    return markdown([head, *([_name(name, row), *_cells(row, len(losses))] for name, row in rows)])


def _name(name: str, row: dict[str, Any]) -> str:
    why = row["error"]
    return name if why is None else f"{name}, which broke off: {why[:_LONGEST_ERROR]}".replace("|", "/")


def _cells(row: dict[str, Any], number: int) -> list[str]:
    seeds = row["seeds"]
    times = [_seconds([seed["reached"][i] for seed in seeds]) for i in range(number)]
    finals = [math.inf if seed["final"] is None else seed["final"] for seed in seeds]
    last = f"{median(finals):.3g}" if finals and math.isfinite(median(finals)) else "—"
    steps = f"{median(seed['steps'] for seed in seeds):.0f}" if seeds else ""
    return [*times, last, steps, _setting(row)]


def _seconds(times: list[float | None]) -> str:
    """The median over seeds, and how many came there where not all did."""
    came = [time for time in times if time is not None]
    if not came:
        return "—"
    share = "" if len(came) == len(times) else f" ({len(came)} of {len(times)})"
    return f"{median(came):.1f}{share}"


def _setting(row: dict[str, Any]) -> str:
    text = ", ".join(f"{_SHORT[name]} {value:g}" for name, value in row["setting"].items())
    return (text or "none") + ("*" if row["at an end"] else "")


_SHORT = {"lr": "α", "damping": "λ", "preconditioning_compute_steps": "roots every"}


def _order(row: dict[str, Any]) -> list[float]:
    """The hardest loss first; who did not come there is last."""
    by_loss = zip(*([math.inf if t is None else t for t in seed["reached"]] for seed in row["seeds"]), strict=True)
    return [median(times) for times in by_loss][::-1]
