"""H_G from products with this minibatch's Fisher factor Γ, as H_A is learned from products with A: in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.extensions import FisherProduct, FisherProducts
from kfqn_ext.linalg import bfgs_updates_each_, few_columns
from kfqn_ext.linalg.padded import stack
from kfqn_ext.optim.inverses.averages import Decay, check_decay, decay_at
from kfqn_ext.optim.inverses.base import (
    Kinds,
    Measured,
    OutputInverse,
    Seen,
    State,
    check_num_random,
    count,
    pairs_first,
    random_columns,
    start_count,
    unit_columns,
)


@dataclass(frozen=True)
class FisherAction(OutputInverse):
    """H_G by BFGS with y = Γ̂ s + ε s, where Γ̂ is Γ of this minibatch's own gradients in units of its mean eigenvalue.

    ``eq_1`` for the other factor. These gradients vanish with the loss, and Γ with them; Γ̂ does not, and neither the
    loss's scale nor a gradient scaler's is in it. It is not blind before BatchNorm: there Σ_t ∂h_t is zero, and
    Σ_t ∂h_t ∂h_tᵀ is not.

    The directions are s = H_G v, the first with H_G v the one in which the last step was longest, the others with v a
    random combination of M's columns. As H_G⁻¹ s = v is known, y is averaged: y = β v + (1 - β) (Γ̂ s + ε s) makes
    H_G⁻¹ s what a moving average of Γ̂ + ε I would have there.

    Attributes:
        decay: β, or k ↦ β.
        num_random: How many directions are random; they depend on the step's number alone.
    """

    decay: Decay = 0.75
    num_random: int = 3
    first: ClassVar[Kinds] = (FisherProducts,)
    in_own_units: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("H_G",)

    def __post_init__(self) -> None:
        """Check both."""
        check_decay(self.decay)
        check_num_random(self.num_random)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        scale = (1.0 / (1.0 + damping)).to(like)
        state["H_G"] = torch.diag_embed(scale.unsqueeze(-1).expand_as(like)).contiguous()
        start_count(state, "pairs_seen_G", damping)

    @property
    def num_directions(self) -> int:  # noqa: D102
        return 1 + self.num_random

    def probe(self, state: State, v: Tensor, step: int) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        random = random_columns(state["momentum"], self.num_random, step)
        V = unit_columns(torch.cat((v.unsqueeze(-2), random.mT), dim=-2).mT)
        return few_columns.product(state["H_G"], V), V

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        known = [i for i, measured in enumerate(seen.first) if measured[FisherProducts].kept is not None]
        if not known:  # no layer had an H_G to choose directions by
            return
        states, damping = [states[i] for i in known], torch.stack([damping[i] for i in known])
        products = [seen.first[i][FisherProducts] for i in known]
        s, y, tried = self._averaged(products, seen, damping)
        kept = bfgs_updates_each_([state["H_G"] for state in states], s, y)
        count(states, "pairs_seen_G", kept.sum(0), torch.zeros_like(tried[0]), (tried & ~kept).sum(0))

    def _averaged(
        self, products: Sequence[FisherProduct], seen: Seen, damping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(s, β v + (1 - β) (Γ̂ s + ε s)) for all directions, [k, L, *B, d], and which are any, bool [k, L, *B]."""
        trace = torch.stack([q.trace for q in products]).unsqueeze(-1)
        usable = seen.finite & torch.isfinite(trace) & (trace > 0)
        sides = zip(*[(q.s, q.Gamma_s, q.kept) for q in products], strict=True)
        s, Gamma_s, v = (pairs_first(stack(side)) for side in sides)
        y = Gamma_s / torch.where(usable, trace, 1.0) + damping.unsqueeze(-1) * s
        y = torch.lerp(y, v, decay_at(self.decay, seen.step))
        return torch.where(usable, s, 0.0), torch.where(usable, y, 0.0), seen.finite & (v != 0).any(-1)
