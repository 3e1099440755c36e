"""How lines look: told apart without colour, the first on top, letters of 8 points at a page's 800 pixels."""

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

WIDTH, DPI = 8.0, 150  # inches, so that 800 pixels have 100 in an inch
MOST = 6  # more can't be told apart
_STYLES: tuple[tuple[str, Any, str], ...] = (
    ("black", "-", ""),
    ("#d62728", "--", ""),
    ("#1f77b4", "-.", ""),
    ("#2ca02c", ":", "o"),
    ("#9467bd", "-", "s"),
    ("0.55", "--", "x"),
)


def look(number: int) -> dict[str, Any]:
    """Of one of the lines of a figure, for ``Axes.plot``."""
    color, style, marker = _STYLES[number]
    width = 2.0 if number == 0 else 1.3
    return {
        **{"color": color, "linestyle": style, "linewidth": width, "zorder": 3.0 - 0.1 * number},
        **{"marker": marker, "markersize": 4, "markevery": 0.1},
    }


def log_axis(ax: Any) -> None:
    """A logarithmic axis of losses whose labels leave room for each other."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=_subs(high / low), numticks=20))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)


def _subs(span: float) -> Sequence[float]:
    """Multiples of powers of ten that are labelled on an axis whose ends have this ratio."""
    if span < 4:
        return range(1, 10)
    return (1, 1.5, 2, 3, 5, 7) if span < 10 else (1, 2, 5) if span < 300 else (1,)
