"""Curves of training and validation against epochs and against seconds, with bands of ± std/√seeds."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, so that no display is needed

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from examples.paper.results import Result
from examples.paper.summary import chosen, mean_curve
from workloads.methods import METHODS
from workloads.problems import PROBLEMS

_DARK, _LIGHT = plt.get_cmap("tab20").colors[::2], plt.get_cmap("tab20").colors[1::2]
# Light blue and light gray come last: they are the nearest to others.
_ALL = (*_DARK, *_LIGHT[1:7], *_LIGHT[8:], _LIGHT[0], _LIGHT[7])
COLORS = dict(zip(METHODS, _ALL, strict=False))


def draw(results: Sequence[Result], problem: str, directory: Path, name: str) -> Path | None:
    """Draw one problem's figure; return its path, or None where there is nothing to draw."""
    methods = chosen(results, problem)
    if not methods:
        return None
    columns = _columns(problem)
    figure, axes = plt.subplots(len(columns), 2, figsize=(10, 3.6 * len(columns)), squeeze=False, layout="constrained")
    for row, (column, label) in zip(axes, columns, strict=True):
        for ax, against in zip(row, ("epoch", "seconds"), strict=True):
            _draw_axes(ax, methods, column, against)
            ax.set_ylabel(label)
    axes[0, 0].legend()
    figure.suptitle(PROBLEMS[problem].title)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _columns(problem: str) -> list[tuple[str, str]]:
    """Rows of the figure: the column of the log and what to call it."""
    if PROBLEMS[problem].kind == "autoencoder":
        return [("train_loss", "training loss")]
    return [("minibatch_loss", "training loss"), ("valid_error", "validation error, %")]


def _draw_axes(ax: Axes, methods: dict[str, list[Result]], column: str, against: str) -> None:
    for method, seeds in methods.items():
        curve = _curve(seeds, column)
        x = curve.index if against == "epoch" else curve["seconds"]
        (line,) = ax.plot(x, curve["mean"], label=METHODS[method].title, color=COLORS[method], linewidth=1.2)
        ax.fill_between(
            x, curve["mean"] - curve["error"], curve["mean"] + curve["error"], color=line.get_color(), alpha=0.25
        )
    ax.set_xlabel("epochs" if against == "epoch" else "seconds of training")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.grid(alpha=0.3, which="both")


def _curve(seeds: list[Result], column: str) -> pd.DataFrame:
    if column != "valid_error":
        return mean_curve(seeds, column)
    curve = mean_curve(seeds, "valid_accuracy")
    return curve.assign(mean=100.0 - curve["mean"])
