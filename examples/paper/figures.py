"""Curves of training and validation against epochs and against seconds, with bands of ± std/√seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, so that no display is needed

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from examples.paper.results import Result
from examples.paper.summary import chosen, mean_curve
from workloads.lines import DPI, MOST, WIDTH, log_axis, look
from workloads.methods import METHODS
from workloads.problems import PROBLEMS


def draw(results: Sequence[Result], problem: str, directory: Path, name: str) -> Path | None:
    """Draw one problem's figure; return its path, or None where there is nothing to draw.

    Of more methods than can be told apart some are drawn, and the others are named above.
    """
    methods = chosen(results, problem)
    if not methods:
        return None
    columns = _columns(problem)
    drawn = few({method: _curve(seeds, columns[0][0]) for method, seeds in methods.items()})
    figure, axes = plt.subplots(
        len(columns), 2, figsize=(WIDTH, 0.9 + 2.6 * len(columns)), squeeze=False, layout="constrained"
    )
    for row, (column, label) in zip(axes, columns, strict=True):
        curves = {method: _curve(methods[method], column) for method in drawn}
        for ax, against in zip(row, ("epoch", "seconds"), strict=True):
            _draw_axes(ax, curves, against, label)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    left_out = [METHODS[method].title for method in methods if method not in drawn]
    aside = f"; not drawn: {', '.join(left_out)}" if left_out else ""
    figure.suptitle(PROBLEMS[problem].title + aside, fontsize=9)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


# Drawn before all others, as every page speaks of them.
_FIRST = ("kbfgs", "kbfgsl", "kfac", "adam", "sgdm")


def few(curves: Mapping[str, pd.DataFrame]) -> list[str]:
    """Methods that are drawn where not all can be, in their own order: the usual ones, then those that end lowest."""

    def rank(method: str) -> tuple[bool, float]:
        return method not in _FIRST, curves[method]["mean"].iloc[-1]

    kept = sorted(curves, key=rank)[:MOST]
    return [method for method in curves if method in kept]


def _columns(problem: str) -> list[tuple[str, str]]:
    """Rows of the figure: the column of the log and what to call it."""
    if PROBLEMS[problem].kind == "autoencoder":
        return [("train_loss", "training loss")]
    return [("minibatch_loss", "training loss"), ("valid_error", "validation error, %")]


def _draw_axes(ax: Axes, curves: Mapping[str, pd.DataFrame], against: str, label: str) -> None:
    """Training losses of an autoencoder end close together, so they count from the lowest of all."""
    floor = min(curve["mean"].min() for curve in curves.values())
    base = floor if floor > 10 else 0.0
    for number, (method, curve) in enumerate(curves.items()):
        x, above = curve.index if against == "epoch" else curve["seconds"], curve["mean"] - base
        ax.plot(x, above, label=METHODS[method].title, **look(number))
        ax.fill_between(x, above - curve["error"], above + curve["error"], color=look(number)["color"], alpha=0.2)
    ax.set_xlabel("epochs" if against == "epoch" else "seconds of training", fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    ax.set_ylabel(f"{label} - {base:.2f}, the lowest" if base else label, fontsize=9)
    _fit(ax, curves, base)
    log_axis(ax)


def _fit(ax: Axes, curves: Mapping[str, pd.DataFrame], base: float) -> None:
    """Show what is drawn, and no more of the lowest point's way to zero."""
    values = pd.concat([curve["mean"] for curve in curves.values()]) - base
    ax.set_ylim(0.8 * values[values > 0].min(), 1.25 * values.max())


def _curve(seeds: list[Result], column: str) -> pd.DataFrame:
    if column != "valid_error":
        return mean_curve(seeds, column)
    curve = mean_curve(seeds, "valid_accuracy")
    return curve.assign(mean=100.0 - curve["mean"])
