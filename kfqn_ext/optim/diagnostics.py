"""What a person can ask about the curvature that an optimizer has learned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext.optim import blocks
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.sides import State


@dataclass(frozen=True)
class SideDiagnostics:
    """One Kronecker inverse; of a layer with channel groups, all of them together.

    Attributes:
        kept: Pairs that updated the inverse.
        damped: Pairs among them that Powell's damping changed.
        skipped: Pairs that were not used: not finite, no curvature, or rounding noise.
        smallest: Smallest eigenvalue of the inverse.
        largest: Largest eigenvalue of the inverse.
        damping: λ_A or λ_G, the largest over channel groups.
    """

    kept: int
    damped: int
    skipped: int
    smallest: float
    largest: float
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
    A: SideDiagnostics | None
    G: SideDiagnostics | None
    leverage: float | None


def diagnose(layer: Layer, state: State, recipe: Recipe, damping: float) -> LayerDiagnostics:
    """Describe a layer's curvature. Decomposes the inverses, and waits for the device."""
    if not blocks.is_started(state) or blocks.is_empty(state):
        return LayerDiagnostics(layer.name, None, None, None)
    dampings = blocks.dampings(layer, state, recipe, damping)
    reference = layer.weight
    eye = {
        side: torch.eye(n, dtype=torch.promote_types(reference.dtype, torch.float32), device=reference.device).expand(
            *layer.geometry.blocks, -1, -1
        )
        for side, n in (("A", layer.geometry.d_in), ("G", layer.geometry.d_out))
    }
    H_A = recipe.input_side.precondition(state, eye["A"])
    H_G = recipe.output_side.precondition(state, eye["G"])
    return LayerDiagnostics(
        layer.name,
        A=_describe(H_A, state.get("pairs_seen_A"), dampings[0]),
        G=_describe(H_G, state.get("pairs_seen_G"), dampings[1]),
        leverage=float(state["leverage"].max()) if "leverage" in state else None,
    )


def _describe(H: Tensor, seen: Tensor | None, damping: Tensor) -> SideDiagnostics:
    eigenvalues = torch.linalg.eigvalsh(H.double())
    kept, damped, skipped = (0, 0, 0) if seen is None else (int(row.sum()) for row in seen)
    return SideDiagnostics(
        kept, damped, skipped, float(eigenvalues.min()), float(eigenvalues.max()), float(damping.max())
    )
