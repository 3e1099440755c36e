"""The text of ``repr(optimizer)``."""

from collections.abc import Sequence
from typing import Any

from kfqn_ext.optim.groups.plan import OTHER, Treatment
from kfqn_ext.optim.groups.schedules import WRITTEN

_HIDDEN = ("params", "param_names", "layout", WRITTEN)


def render(name: str, groups: Sequence[dict[str, Any]], treatments: Sequence[Treatment], other: str) -> str:
    """Lay out hyperparameters by group and the treatment of every parameter; ``other`` is that of what has no block."""
    lines = [f"{name} ("]
    for i, group in enumerate(groups):
        values = ", ".join(f"{k}={v}" for k, v in group.items() if k not in _HIDDEN)
        lines.append(f"  group {i}: {values}")
    cells = [("parameter", "shape", "treatment", "how, or why")]
    for r in treatments:
        treatment = other if r.treatment == OTHER else r.treatment
        cells.append((r.parameter, "×".join(map(str, r.shape)) or "scalar", treatment, r.reason))
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    for row in cells:
        lines.append("  " + "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]))
    return "\n".join([*lines, ")"])
