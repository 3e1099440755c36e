"""The text of ``repr(optimizer)``, and tables of words and numbers."""

from collections.abc import Sequence
from math import prod
from typing import Any

from kfqn_ext.optim.groups.plan import GONE, OTHER, Treatment
from kfqn_ext.optim.groups.schedules import WRITTEN, Schedule, followed
from kfqn_ext.optim.recipe import Recipe

_HIDDEN = ("params", "param_names", "layout", WRITTEN)


def render(
    name: str,
    groups: Sequence[dict[str, Any]],
    schedules: Sequence[dict[str, Schedule]],
    treatments: Sequence[Treatment],
    recipe: Recipe,
    share: str = "",
) -> str:
    """Lay out hyperparameters by group, the treatment of every parameter, and how much of the model has a block.

    ``share`` says where the state of layers is, where several processes share it.
    """
    lines, other = [f"{name} ("], recipe.others.title
    hidden = (*_HIDDEN, *(() if recipe.recomputes else ("inverse_update_freq",)))
    for i, (group, functions) in enumerate(zip(groups, schedules, strict=True)):
        scheduled = followed(group, functions)
        shown = {k: f"{v} (a function of the step)" if k in scheduled else v for k, v in group.items()}
        lines.append(f"  group {i}: " + ", ".join(f"{k}={v}" for k, v in shown.items() if k not in hidden))
    cells = [["parameter", "shape", "treatment", "how, or why"]]
    for r in treatments:
        treatment = other if r.treatment == OTHER else r.treatment
        cells.append([r.parameter, "×".join(map(str, r.shape)) or "scalar", treatment, r.reason])
    lines += [f"  {line}" for line in aligned(cells, words=4)]
    sizes = [(prod(r.shape), r.treatment != OTHER) for r in treatments if r.reason != GONE]
    total, covered = sum(size for size, _ in sizes), sum(size for size, has_block in sizes if has_block)
    lines += [f"  in blocks: {covered / total:.1%} of {total:,} parameters"]
    lines += [f"  state of these layers: {share}"] if share else []
    return "\n".join([*lines, ")"])


def aligned(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Lay rows out in columns: the first ``words`` columns on the left, those of numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [f"{'<' if i < words else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, sides)).rstrip() for row in rows]
