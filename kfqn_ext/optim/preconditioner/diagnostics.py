"""What a person can ask about the curvature that an optimizer has learned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext.optim.groups.plan import Block
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
    A: InverseDiagnostics | None
    G: InverseDiagnostics | None
    leverage: float | None


def diagnose(block: Block, recipe: Recipe) -> LayerDiagnostics:
    """Describe a layer's curvature. Decomposes the inverses, and waits for the device."""
    held, state = inverses(block, recipe), block.state
    if held is None:
        return LayerDiagnostics(block.layer.name, None, None, None)
    (H_A, H_G), (damping_A, damping_G) = held.dense(), blocks.dampings(block, recipe)
    return LayerDiagnostics(
        block.layer.name,
        A=_describe(H_A, state.get("pairs_seen_A"), damping_A),
        G=_describe(H_G, state.get("pairs_seen_G"), damping_G),
        leverage=float(state["leverage"].max()) if "leverage" in state else None,
    )


def _describe(H: Tensor, seen: Tensor | None, damping: Tensor) -> InverseDiagnostics:
    eigenvalues = torch.linalg.eigvalsh(H.double())
    kept, damped, skipped = (0, 0, 0) if seen is None else (int(row.sum()) for row in seen)
    return InverseDiagnostics(
        kept, damped, skipped, float(eigenvalues.min()), float(eigenvalues.max()), float(damping.max())
    )
