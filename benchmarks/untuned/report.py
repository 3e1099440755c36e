"""The scores as Markdown tables, and performance profiles as a figure."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.report import markdown, save
from benchmarks.untuned import scores
from workloads.lines import MOST, WIDTH, look

Results = dict[str, Any]
Losses = dict[str, dict[str, float]]  # by optimizer, then by problem
_FIRST = ("onepass", "onepass-kfac", "kfac-untuned", "adam")  # lines that are drawn before all others, ours on top
_WIDEST = 1e3  # of a profile
_AHEAD = ("soap", "muon")
_WITHIN = 1.3  # of the best of these


def render(results: Results) -> str:
    """All tables of a log."""
    blocks = ["Small networks and few steps, to see that it runs."] if results["quick"] else []
    for steps in results["lengths"]:
        blocks += [
            f"### {steps} steps",
            "In all, by means over seeds. Ratios are of the losses themselves, also where these have a floor above 0.",
            _counts(results, steps),
            "Loss of the last ten minibatches: mean over seeds, and each seed.",
            _table(results, steps, "losses", _with_seeds),
            "The same of shorter runs, whose rate falls to zero in the seconds that tuned Adam takes for all steps.",
            _table(results, steps, "in_seconds", _with_seeds),
            "Loss on validation data at the end, mean over seeds.",
            _table(results, steps, "valid", lambda values: short(scores.mean(values))),
            "Settings that were tuned on the first seed; ◂ is an end of the grid.",
            _settings(results, steps),
        ]
    return "\n\n".join([*blocks, *failures(results), cost(results), f"`{results['command']}`"])


def _by_name(results: Results, steps: int) -> dict[str, dict[str, scores.Cell]]:
    """Cells of a length by optimizer and problem."""
    found: dict[str, dict[str, scores.Cell]] = {}
    for cell in results["cells"]:
        if cell["steps"] == steps:
            found.setdefault(cell["optimizer"], {})[cell["problem"]] = cell
    return found


def losses(results: Results, steps: int, what: str) -> Losses:
    """Means over seeds, of those that ran."""
    return {
        name: {problem: scores.mean(cell[what]) for problem, cell in row.items() if cell[what] is not None}
        for name, row in _by_name(results, steps).items()
    }


def _table(results: Results, steps: int, what: str, text: Callable[[Sequence[float | None]], str]) -> str:
    return _grid(results, steps, lambda cell: "" if cell[what] is None else text(cell[what]))


def _settings(results: Results, steps: int) -> str:
    def text(cell: scores.Cell) -> str:
        return ", ".join(f"{value:g}" for value in cell["setting"].values()) + (" ◂" if cell["is_end"] else "")

    return _grid(results, steps, text)


def _grid(results: Results, steps: int, text: Callable[[scores.Cell], str]) -> str:
    rows = [["", *results["problems"]]]
    for name, row in _by_name(results, steps).items():
        texts = [text(row[problem]) if problem in row else "" for problem in results["problems"]]
        if any(texts):
            rows.append([results["optimizers"][name], *texts])
    return markdown(rows)


def _counts(results: Results, steps: int) -> str:
    after, timed, shorter = (losses(results, steps, what) for what in ("losses", "at_seconds", "in_seconds"))
    base = {scores.BASE: after[scores.BASE]} if scores.BASE in after else {}
    cells = _by_name(results, steps)
    head = ["", "better than tuned Adam", "in its seconds, cut", "in its seconds, shorter"]
    rows = [[*head, "÷ best of SOAP and Muon: at most 1.3", "median", "largest", "seconds ÷ Adam's"]]
    for name, title in results["optimizers"].items():
        if name in cells:
            counts = [count(table, name) for table in (after, timed, {**shorter, **base})]
            rows.append([title, *counts, *ahead(after, name), _seconds(cells, name)])
    return markdown(rows)


def count(table: Losses, name: str) -> str:
    """On how many problems an optimizer is below tuned Adam."""
    if name == scores.BASE or scores.BASE not in table or not table[name]:
        return ""
    wins, number = scores.better(table[name], table[scores.BASE])
    return f"{wins} of {number}"


def ahead(table: Losses, name: str) -> tuple[str, str, str]:
    """Beside the better of SOAP and Muon: on how many problems it is near, the median ratio, and the largest."""
    found = scores.ratios(table[name], [table[other] for other in _AHEAD if other in table])
    if not found:
        return "", "", ""
    return f"{sum(ratio <= _WITHIN for ratio in found)} of {len(found)}", short(median(found)), short(found[-1])


def _seconds(cells: dict[str, dict[str, scores.Cell]], name: str) -> str:
    base = cells.get(scores.BASE, {})
    logs = [math.log(cell["seconds"] / base[key]["seconds"]) for key, cell in cells[name].items() if _runs(cell, base)]
    return f"{math.exp(fmean(logs)):.1f}" if logs else ""


def _runs(cell: scores.Cell, base: dict[str, scores.Cell]) -> bool:
    """Whether all seeds of a cell ran to their end, and the base's."""
    return all(math.isfinite(scores.mean(each["losses"])) for each in (cell, base.get(cell["problem"], {"losses": []})))


def failures(results: Results) -> list[str]:
    """What went wrong, and where."""
    errors = dict.fromkeys((cell["optimizer"], cell["problem"], cell["error"]) for cell in results["cells"])
    return [
        f"{results['optimizers'][name]} on {problem}: {error}." for name, problem, error in errors if error is not None
    ]


def cost(results: Results) -> str:
    """How many runs there were, and how long they took."""
    number, steps, wall = (results["cost"][key] for key in ("runs", "seconds", "wall"))
    return f"{number} runs took {wall / 60:.0f} minutes of one process in all, {steps / 60:.0f} of them in steps."


def _with_seeds(values: Sequence[float | None]) -> str:
    if all(value is None for value in values):
        return "fails"
    each = ", ".join(short(math.inf if value is None else value) for value in values)
    return f"{short(scores.mean(values))} ({each})" if len(values) > 1 else each


def short(value: float) -> str:
    """A loss or a ratio, to three digits."""
    return f"{value:.3g}" if math.isfinite(value) else "∞"


def draw(results: Results, path: Path, kinds: Sequence[str] = ("losses", "at_seconds")) -> None:
    """Draw performance profiles: the share of problems on which a loss is within a factor of the best one's."""
    panels = [(steps, what) for steps in results["lengths"] for what in kinds]
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(WIDTH, 0.9 + 2.5 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax, (steps, what) in zip(axes.flat, panels, strict=False):
        table = losses(results, steps, what)
        for number, name in enumerate(_shown(results)):
            if table.get(name):
                _steps(ax, scores.profile(table, name), label=results["optimizers"][name], **look(number))
        ax.set_title(f"{steps} steps" if what == "losses" else f"in Adam's seconds of {steps} steps", fontsize=9)
        _axes(ax)
    for ax in axes[-1]:
        ax.set_xlabel("loss ÷ best loss", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of problems", fontsize=9)
    lines = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=MOST // 2, fontsize=8, frameon=False)
    save(figure, path)


def _axes(ax: Any) -> None:
    ax.set(xscale="log", xlim=(0.97, _WIDEST), ylim=(0, 1.03))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)


def _steps(ax: Any, factors: Sequence[float], **style: Any) -> None:
    finite = [factor for factor in factors if math.isfinite(factor)]
    shares = [(number + 1) / len(factors) for number in range(len(finite))]
    ax.step([1, *finite, _WIDEST], [0, *shares, shares[-1] if shares else 0], where="post", **style)


def _shown(results: Results) -> list[str]:
    """The optimizers that lines are drawn of: the usual ones, then those that are nearest to the best."""

    def rank(name: str) -> tuple[int, float]:
        tables = [losses(results, steps, "losses") for steps in results["lengths"]]
        factors = [factor for table in tables if name in table for factor in scores.profile(table, name)]
        distance = fmean(math.log(min(factor, _WIDEST)) for factor in factors) if factors else math.inf
        return _FIRST.index(name) if name in _FIRST else len(_FIRST), distance

    return sorted(results["optimizers"], key=rank)[:MOST]
