"""What a person can ask about the curvature that an optimizer has learned."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kfqn_ext.optim.groups.plan import Block
from kfqn_ext.optim.groups.repr import aligned
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner.operators import inverses
from kfqn_ext.optim.recipe import Recipe


@dataclass(frozen=True)
class InverseDiagnostics:
    """One Kronecker inverse; of a layer with channel groups, all of them together.

    Attributes:
        kept: Pairs that updated the inverse.
        damped: Pairs among them that Powell's damping changed.
        skipped: Pairs that were not used: not finite, no curvature, or rounding noise.
        smallest: Smallest eigenvalue of the inverse, None where eigenvalues were not asked for.
        largest: Largest eigenvalue of the inverse, None likewise.
        damping: λ_A or λ_G, the largest over channel groups.
    """

    kept: int
    damped: int
    skipped: int
    smallest: float | None
    largest: float | None
    damping: float


@dataclass(frozen=True)
class LayerDiagnostics:
    """The curvature of one layer.

    Attributes:
        name: The layer.
        A: H_A, None before it exists.
        G: H_G, None before it exists.
        leverage: |T| āᵀ H_A ā in the last update, the largest over channel groups. At most 1 for the inverse of this
            minibatch's A + λ_A I; far above 1, H_A is stale. None where nothing measures it.
    """

    name: str
    A: InverseDiagnostics | None
    G: InverseDiagnostics | None
    leverage: float | None


class Diagnostics(list[LayerDiagnostics]):
    """The curvature of all layers: a list that prints as a table, two rows a layer.

    Example:
        >>> import torch
        >>> from kfqn_ext import KBFGS
        >>> print(KBFGS(torch.nn.Sequential(torch.nn.Linear(4, 3))).diagnostics())  # before the first step
        layer  inverse  kept  damped  skipped  damping  leverage
        0      H_A         -       -        -        -         -
        0      H_G         -       -        -        -         -
    """

    def __str__(self) -> str:
        """Lay out a table; the columns of eigenvalues are there where they were asked for."""
        numbers = [field for field in _NUMBERS if field not in _EIGENVALUES or self._has_eigenvalues()]
        rows = [["layer", "inverse", *numbers, "leverage"]]
        for layer in self:
            for name, side in _sides(layer):
                leverage = layer.leverage if name == "H_A" else None
                values = [*(getattr(side, field, None) for field in numbers), leverage]
                rows.append([layer.name, name, *map(_cell, values)])
        return "\n".join(aligned(rows, words=2))

    def as_dict(self) -> dict[str, int | float]:
        """Return one flat dictionary for a logger: names such as "0/H_A/kept" and "0/leverage" ↦ Python numbers.

        What is not known, as before the first step, has no entry.
        """
        found: dict[str, int | float | None] = {}
        for layer in self:
            for name, side in _sides(layer):
                found |= {f"{layer.name}/{name}/{field}": getattr(side, field, None) for field in _NUMBERS}
            found[f"{layer.name}/leverage"] = layer.leverage
        return {name: value for name, value in found.items() if value is not None}

    def _has_eigenvalues(self) -> bool:
        return any(side is not None and side.smallest is not None for layer in self for _, side in _sides(layer))


_NUMBERS = [field.name for field in fields(InverseDiagnostics)]
_EIGENVALUES = ("smallest", "largest")


def _sides(layer: LayerDiagnostics) -> tuple[tuple[str, InverseDiagnostics | None], ...]:
    return ("H_A", layer.A), ("H_G", layer.G)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def diagnose(block: Block, recipe: Recipe, eigenvalues: bool) -> LayerDiagnostics:
    """Describe a layer's curvature. Waits for the device; decomposes the inverses where eigenvalues are asked for."""
    held, state = inverses(block, recipe), block.state
    if held is None:
        return LayerDiagnostics(block.layer.name, None, None, None)
    damping_A, damping_G = blocks.dampings(block, recipe)
    H_A, H_G = held.dense() if eigenvalues else (None, None)
    return LayerDiagnostics(
        block.layer.name,
        A=_describe(H_A, state.get("pairs_seen_A"), damping_A),
        G=_describe(H_G, state.get("pairs_seen_G"), damping_G),
        leverage=float(state["leverage"].max()) if "leverage" in state else None,
    )


def _describe(H: Tensor | None, seen: Tensor | None, damping: Tensor) -> InverseDiagnostics:
    kept, damped, skipped = (0, 0, 0) if seen is None else map(int, seen.reshape(3, -1).sum(1).tolist())
    smallest, largest = (None, None) if H is None else _extremes(H)
    return InverseDiagnostics(kept, damped, skipped, smallest, largest, float(damping.max()))


def _extremes(H: Tensor) -> tuple[float, float]:
    eigenvalues = torch.linalg.eigvalsh(H.double())
    return float(eigenvalues.min()), float(eigenvalues.max())
