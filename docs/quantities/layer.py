"""Draw a patch and a layer: ``python docs/quantities/layer.py`` writes layer.png beside this file."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

DARK = "0.35"


def grid(ax: Any, x: float, y: float, rows: int, columns: int, dark: Any) -> None:
    """Cells with their lower left corner at (x, y); those in ``dark`` are filled, counted from the upper left."""
    for i in range(rows):
        for j in range(columns):
            color = DARK if (i, j) in dark else "white"
            ax.add_patch(Rectangle((x + j, y + rows - 1 - i), 1, 1, facecolor=color, edgecolor="0.5", linewidth=0.8))


def arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "linewidth": 1.4})
    ax.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.35, text, ha="center", fontsize=10)


def main() -> None:
    figure, ax = plt.subplots(figsize=(8, 3.1), layout="constrained")
    grid(ax, 0, 0, 6, 6, {(i, j) for i in (1, 2, 3) for j in (2, 3, 4)})
    ax.text(3, 6.3, "input of one datum", ha="center", fontsize=10)
    ax.text(3, -0.9, "3 × 3 pixels: the patch at t", ha="center", fontsize=10)
    arrow(ax, (6.3, 3.5), (9, 3.5), "stacked")
    grid(ax, 9.3, -2, 10, 1, {(i, 0) for i in range(9)})
    ax.text(9.8, -1.5, "1", ha="center", va="center", fontsize=10)
    ax.text(9.8, 8.3, "$a_t$", ha="center", fontsize=12)
    ax.text(10.6, -1.5, "for the bias", va="center", fontsize=9)
    arrow(ax, (10.6, 3.5), (13.6, 3.5), "$h_t = W a_t$")
    grid(ax, 13.9, 1.5, 4, 1, {(i, 0) for i in range(4)})
    ax.text(14.4, 5.8, "$h_t$", ha="center", fontsize=12)
    arrow(ax, (15.2, 3.5), (18, 3.5), "place t")
    for k in range(4):
        grid(ax, 18.3 + 0.7 * k, 0.6 + 0.7 * k, 4, 4, {(1, 2)})
    ax.text(21.4, 7.1, "output: 4 channels, |T| = 16", ha="center", fontsize=10)
    ax.text(21.4, -0.9, "$\\partial h_t$: the gradient by this column", ha="center", fontsize=10)
    ax.set(xlim=(-0.5, 26), ylim=(-2.4, 9.2), aspect="equal")
    ax.set_axis_off()
    figure.savefig(Path(__file__).with_name("layer.png"), dpi=150)


if __name__ == "__main__":
    main()
