"""Pictures of a comparison. matplotlib is imported when one is drawn; no display is needed."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.curvature.lazy import need
from kfqn_ext.curvature.report import FLOOR, GRADIENT, HELD, CurvatureReport, LayerReport

# At a page's width of 800 pixels a figure of 8 inches has letters of their nominal size.
_WIDTH, _DPI = 8.0, 150
_FONT = 8
_HEAT_MAPS, _LINES = 4, 6
# Lines are told apart without colour too; the exact block, and in tracks the first run, is black and on top.
_STYLES: tuple[tuple[str, Any], ...] = (
    ("black", "-"),
    ("#d62728", "--"),
    ("#1f77b4", "-."),
    ("#2ca02c", ":"),
    ("#9467bd", (0, (6, 2, 1, 2, 1, 2))),
    ("0.6", "-"),
)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure, making its folder where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def plot_report(layers: Sequence[LayerReport], path: str | Path) -> None:
    """Draw each layer's errors, spectra and matrices.

    Args:
        layers: The layers.
        path: File to write.
    """
    has_maps = any(layer.images for layer in layers)
    height = 3.6 + 2.3 * has_maps
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(_WIDTH, height * len(layers)), layout="constrained")
    parts = figure.subfigures(len(layers), 1, squeeze=False)[:, 0]
    for part, layer in zip(parts, layers, strict=True):
        part.suptitle(layer.title, fontsize=_FONT + 2)
        above, below = part.subfigures(2, 1, height_ratios=(3.6, 2.3 if has_maps else 0.01))
        left, right = above.subfigures(1, 2, width_ratios=(1.25, 1))
        _draw_errors(left.subplots(), layer)
        _draw_spectra(right.subplots(), layer)
        if has_maps:
            _draw_heat_maps(below, below.subplots(1, _HEAT_MAPS, squeeze=False).flatten(), layer)
    save(figure, path)


def _draw_errors(axes: Any, layer: LayerReport) -> None:
    """Horizontal bars; errors far below one part in 10⁴ are cut there, the exact block has none."""
    rows = [row for row in layer.rows if math.isfinite(row.error) and row.rung != "exact block"][::-1]
    bars = axes.barh(
        [f"{row.rung}  {row.label}".rstrip() for row in rows],
        [max(row.error, _LEAST) for row in rows],
        xerr=[0.0 if math.isnan(row.error_se) else row.error_se for row in rows],
        color="#7b9cc9",
    )
    axes.set_xscale("log")
    # Room for the numbers behind the bars.
    axes.set_xlim(_LEAST / 2, 1e3 * max([row.error for row in rows], default=1.0))
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.bar_label(bars, [f"{row.error:.2g}" for row in rows], fontsize=_FONT, padding=2)
    axes.tick_params(labelsize=_FONT)
    axes.set_xlabel("relative Frobenius error", fontsize=_FONT)


_LEAST = 1e-4


def _draw_heat_maps(figure: Any, axes: Sequence[Any], layer: LayerReport) -> None:
    """One colour scale for all, set by the exact block: what is beyond it is shown as its end."""
    names = telling(layer, list(layer.images), _HEAT_MAPS)
    scale = layer.images[names[0]].abs().flatten()
    limit = float(torch.quantile(scale, 0.995)) or float(scale.max()) or 1.0
    picture = None
    for ax, name in zip(axes, names, strict=False):
        picture = ax.imshow(layer.images[name].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        ax.set_title(name, fontsize=_FONT)
    for ax in axes:
        ax.set(xticks=[], yticks=[])
        ax.set_axis_off()
    bar = figure.colorbar(picture, ax=list(axes), shrink=0.8, extend="both")
    bar.ax.tick_params(labelsize=_FONT)


_TELLING = ("exact block", "A ⊗ G", HELD, FLOOR, "(A + λ_A I) ⊗ (G + λ_G I)", "Gauss-Newton")


def telling(layer: LayerReport, names: Sequence[str], most: int) -> list[str]:
    """The rungs to show where not all can be: the exact block, the paper's, what is held, and the floor.

    Args:
        layer: The layer.
        names: Rungs that can be shown.
        most: How many.

    Returns:
        At most so many, in the order of the ladder; none that equals the exact block, which would hide it.
    """
    errors = {row.rung: row.error for row in layer.rows}
    shown = [name for name in names if name == "exact block" or not errors.get(name, 0.0) <= 1e-6]

    def rank(name: str) -> int:
        return next((i for i, part in enumerate(_TELLING) if part in name), len(_TELLING))

    kept = sorted(shown, key=rank)[:most]
    return [name for name in shown if name in kept]


def _draw_spectra(axes: Any, layer: LayerReport) -> None:
    """Eigenvalues by rank on log axes, the negative ones as thin curves of their absolute value."""
    largest = max((float(values.abs().max()) for values in layer.spectra.values()), default=1.0) or 1.0
    for name, (colour, style) in zip(telling(layer, list(layer.spectra), _LINES), _STYLES, strict=False):
        positive, negative = _sides(layer.spectra[name])
        top = 3 if name == "exact block" else 2
        axes.plot(_ranks(positive), positive, linestyle=style, color=colour, label=name, linewidth=1.8, zorder=top)
        axes.plot(_ranks(negative), negative, linestyle=style, color=colour, linewidth=0.8, zorder=top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(largest * 1e-7, largest * 2)
    axes.tick_params(labelsize=_FONT)
    axes.set_xlabel("rank", fontsize=_FONT)
    axes.set_title("eigenvalues; thin: minus the negative ones", fontsize=_FONT)
    if axes.lines:
        axes.legend(fontsize=_FONT, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)


def _ranks(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _sides(values: Tensor) -> tuple[list[float], list[float]]:
    """Positive eigenvalues from the largest, and negative ones from the largest in absolute value."""
    return values[values > 0].flip(0).tolist(), (-values[values < 0]).tolist()


TRACKED = {
    "H_A_error": "H_A against (A + λ_A I)⁻¹",
    "H_G_error": "H_G against (G + λ_G I)⁻¹",
    "H_aim_error": "H against the product of both aims",
    "H_error": "H against (A ⊗ G + λI)⁻¹",
    "H_exact_error": "H against (B + λI)⁻¹",
    "angle": "angle to Newton's direction, °",
    "share": "share of Newton's decrease",
}
_ACROSS = 3


def plot_tracks(tracks: Mapping[str, Sequence[tuple[int, CurvatureReport]]], path: str | Path) -> None:
    """Draw how the held H_A and H_G came along in one or several training runs, three pictures in a row.

    Args:
        tracks: Reports by step, as ``CurvatureTracker.reports``, by the run's name.
        path: File to write.

    Raises:
        ValueError: If nothing was measured.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    layers = [layer.name for reports in tracks.values() for _, report in reports[:1] for layer in report]
    names = list(dict.fromkeys(layers))
    if not names:
        raise ValueError("Nothing was measured yet: call the tracker after each step.")
    rows = -(-(len(TRACKED) + 1) // _ACROSS)  # one place is the legend's
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(_WIDTH, 2.2 * rows * len(names)), layout="constrained")
    parts = figure.subfigures(len(names), 1, squeeze=False)[:, 0]
    for part, name in zip(parts, names, strict=True):
        part.suptitle(f"layer {name}", fontsize=_FONT + 2)
        places = part.subplots(rows, _ACROSS, squeeze=False).flatten()
        for ax, (quantity, title) in zip(places, TRACKED.items(), strict=False):
            _draw_quantity(ax, tracks, name, quantity, title)
        for ax in places[len(TRACKED) :]:
            ax.set_axis_off()
        places[len(TRACKED)].legend(*places[0].get_legend_handles_labels(), fontsize=_FONT, loc="center", frameon=False)
    save(figure, path)


def _draw_quantity(
    ax: Any, tracks: Mapping[str, Sequence[tuple[int, CurvatureReport]]], layer: str, quantity: str, title: str
) -> None:
    """One number of all runs; the first run is drawn on top."""
    for i, (run, reports) in enumerate(tracks.items()):
        _draw_track(ax, reports, layer, quantity, _STYLES[i % len(_STYLES)][0], _MARKERS[i % len(_MARKERS)], run)
    ax.set_title(title, fontsize=_FONT)
    ax.set_xlabel("step", fontsize=_FONT)
    ax.tick_params(labelsize=_FONT)
    if quantity.endswith("error"):
        _log_axis(ax)


def _log_axis(ax: Any) -> None:
    """A logarithmic axis with two labels at least, which leave room for each other."""
    ticker = need("matplotlib.ticker", "plot()")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5) if high < 100 * low else (1,)
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=20))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())


_MARKERS = ("o", "s", "^", "v", "D", "x")


def _draw_track(
    ax: Any,
    reports: Sequence[tuple[int, CurvatureReport]],
    layer: str,
    quantity: str,
    colour: str,
    marker: str,
    run: str,
) -> None:
    """Solid: what the optimizer holds. Dotted: gradient descent with the same λ, for H_G I / λ_G: the mark to beat."""
    beside = ("start_G_error", HELD) if quantity == "H_G_error" else (quantity, GRADIENT)
    for held, style, (number, ending) in ((True, "-", (quantity, HELD)), (False, ":", beside)):
        points = [
            (step, getattr(row, number))
            for step, report in reports
            for row in report[layer].rows
            if row.rung.endswith(ending)
        ]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        if points:
            look = {"marker": marker, "markersize": 3.5} if held else {}
            line = {"color": colour, "label": run if held else None, "linewidth": 1.4 if held else 1.0, **look}
            ax.plot(*zip(*points, strict=True), style, **line)
