"""Pictures of a comparison. matplotlib is imported when one is drawn; no display is needed."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.curvature.lazy import need
from kfqn_ext.curvature.report import GRADIENT, HELD, CurvatureReport, LayerReport

_HEAT_MAPS = 8


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Make a figure of rows × columns axes that belongs to no window.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure, making its folder where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def plot_report(layers: Sequence[LayerReport], path: str | Path) -> None:
    """Draw each layer's errors, matrices and spectra.

    Args:
        layers: The layers.
        path: File to write.
    """
    heat_maps = min(_HEAT_MAPS, max(len(layer.images) for layer in layers))
    lines = -(-heat_maps // 4)
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(17, 5.6 * len(layers)), layout="constrained")
    parts = figure.subfigures(len(layers), 1, squeeze=False)[:, 0]
    for part, layer in zip(parts, layers, strict=True):
        part.suptitle(layer.title, fontsize=11)
        left, middle, right = part.subfigures(1, 3, width_ratios=(1.1, 1.5 if heat_maps else 0.01, 0.9))
        _draw_errors(left.subplots(), layer)
        if heat_maps:
            _draw_heat_maps(middle, middle.subplots(lines, 4, squeeze=False).flatten(), layer)
        _draw_spectra(right.subplots(), layer)
    save(figure, path)


def _draw_errors(axes: Any, layer: LayerReport) -> None:
    """Horizontal bars; errors far below one part in 10⁴ are cut there, the exact block has none."""
    rows = [row for row in layer.rows if math.isfinite(row.error) and row.rung != "exact block"][::-1]
    bars = axes.barh(
        [f"{row.rung}  {row.label}".rstrip() for row in rows],
        [max(row.error, 1e-4) for row in rows],
        xerr=[0.0 if math.isnan(row.error_se) else row.error_se for row in rows],
        color="#4c72b0",
    )
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.bar_label(bars, [f"{row.error:.2g}" for row in rows], fontsize=7, padding=2)
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("relative Frobenius error")


def _draw_heat_maps(figure: Any, axes: Sequence[Any], layer: LayerReport) -> None:
    """One colour scale for all, set by the exact block: what is beyond it is shown as its end."""
    names = _most_telling(layer)
    scale = layer.images[names[0]].abs().flatten()
    limit = float(torch.quantile(scale, 0.995)) or float(scale.max()) or 1.0
    picture = None
    for ax, name in zip(axes, names, strict=False):
        picture = ax.imshow(layer.images[name].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        ax.set_title(name, fontsize=7)
    for ax in axes:
        ax.set(xticks=[], yticks=[])
        ax.set_axis_off()
    figure.colorbar(picture, ax=list(axes), shrink=0.8)


def _most_telling(layer: LayerReport) -> list[str]:
    """The exact block first and the floor last, without the rung that equals the exact block."""
    names = [row.rung for row in layer.rows if row.rung in layer.images]
    names = names[:1] + [row.rung for row in layer.rows[1:] if row.rung in layer.images and row.error > 1e-6]
    return names if len(names) <= _HEAT_MAPS else [*names[: _HEAT_MAPS - 1], names[-1]]


def _draw_spectra(axes: Any, layer: LayerReport) -> None:
    """Eigenvalues by rank, positive and negative ones as separate curves of their absolute value."""
    largest = max((float(values.abs().max()) for values in layer.spectra.values()), default=1.0) or 1.0
    colours = need("matplotlib", "plot()").colormaps["tab20"]
    # A rung that equals the exact block would hide it.
    shown = {row.rung for row in layer.rows if row.rung == "exact block" or row.error > 1e-6}
    for i, (name, values) in enumerate((name, v) for name, v in layer.spectra.items() if name in shown):
        colour = "black" if name == "exact block" else colours((i - 1) % 20)
        positive, negative = _sides(values)
        axes.plot(range(1, len(positive) + 1), positive, color=colour, label=name, linewidth=1.2)
        axes.plot(range(1, len(negative) + 1), negative, color=colour, linestyle=":", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylim(largest * 1e-7, largest * 2)
    axes.set_xlabel("rank")
    axes.set_title("eigenvalues; dotted: absolute values of negative ones", fontsize=8)
    if axes.lines:
        axes.legend(fontsize=6)


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


def plot_tracks(tracks: Mapping[str, Sequence[tuple[int, CurvatureReport]]], path: str | Path) -> None:
    """Draw how the held H_A and H_G came along in one or several training runs, one row of pictures a layer.

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
    figure, axes = new_figure(len(names), len(TRACKED), 3.4 * len(TRACKED), 3.1 * len(names))
    for line, name in zip(axes, names, strict=True):
        for ax, (quantity, title) in zip(line, TRACKED.items(), strict=True):
            for i, (run, reports) in enumerate(tracks.items()):
                _draw_track(ax, reports, name, quantity, f"C{i}", run)
            ax.set_title(f"{name}: {title}", fontsize=9)
            ax.set_xlabel("step", fontsize=8)
            if quantity.endswith("error"):
                ax.set_yscale("log")
    axes[0, 0].legend(fontsize=7)
    save(figure, path)


def _draw_track(
    ax: Any, reports: Sequence[tuple[int, CurvatureReport]], layer: str, quantity: str, colour: str, run: str
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
            ax.plot(*zip(*points, strict=True), style, color=colour, label=run if held else None, linewidth=1.3)
