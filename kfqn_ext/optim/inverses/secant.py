"""H_G by BFGS or L-BFGS on moving averages of (Δh̄, Δ∂h̄), ``eq_6`` and ``eq_7``, with double damping."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.linalg import bfgs_update_each_, flush_, powell_lm
from kfqn_ext.linalg.padded import stack, unstack
from kfqn_ext.linalg.pairs import common_scale, dot
from kfqn_ext.optim.inverses.base import (
    Kinds,
    Measured,
    OutputInverse,
    Seen,
    State,
    count,
    read,
    start_count,
    write,
)
from kfqn_ext.optim.inverses.lbfgs import checked_history_size, divide, start_pairs, times_pairs, update_pairs
from kfqn_ext.optim.inverses.scaled_identity import ScaledIdentity, inverse_damping
from kfqn_ext.optim.inverses.unit import LossUnit, Unit

PairDamping = Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Secant(OutputInverse):
    """What the two forms of H_G share: how pairs are averaged and damped.

    Attributes:
        pair_damping: Damps (s, y) given H y, μ₁ and μ₂ = λ_G.
        initial: λ_G ↦ scale of H_G⁰.
        mu1: μ₁ of Powell's damping.
        decay: β of the moving averages.
        unit: What H_G counts in.
    """

    pair_damping: PairDamping = powell_lm
    initial: Callable[[Tensor], Tensor] = inverse_damping
    mu1: float = 0.2
    decay: float = 0.9
    unit: Unit = LossUnit()
    first: ClassVar[Kinds] = (KBFGSQuantities,)
    second: ClassVar[Kinds] = (KBFGSQuantities,)

    def __post_init__(self) -> None:
        """Check the constants."""
        if not 0 < self.mu1 < 1:
            raise ValueError(f"Invalid mu1: {self.mu1}. It must be in (0, 1).")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay: {self.decay}. It must be in [0, 1).")

    def where_shifts_are_removed(self) -> OutputInverse:  # noqa: D102
        return ScaledIdentity(self.initial, self.unit)

    def _start_pairs(self, state: State, like: Tensor, damping: Tensor) -> None:
        """Make what both forms keep beside H_G; ``like``: [*B, d_out]."""
        state["s_G"], state["y_G"] = torch.zeros_like(like), torch.zeros_like(like)
        start_count(state, "pairs_seen_G", damping)
        self.unit.start(state)

    def _damped_pairs(self, states: Sequence[State], seen: Seen, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(s̃, ỹ), empty where this step brought no news, and where Powell's damping changed s; bool [L, *B]."""
        s, y, news = _average_pairs(states, seen, self.decay)
        vectors = unstack(y, [state["y_G"].shape[-1] for state in states])
        Hy = stack(
            self.precondition(state, v.unsqueeze(-1)).squeeze(-1) for state, v in zip(states, vectors, strict=True)
        )
        s_damped, y_damped = self.pair_damping(s, y, Hy, self.mu1, damping.unsqueeze(-1))
        # An empty pair changes nothing.
        damped = (s_damped != s).any(-1) & news.squeeze(-1)
        return torch.where(news, s_damped, 0.0), torch.where(news, y_damped, 0.0), damped


def _average_pairs(states: Sequence[State], seen: Seen, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Move s_G and y_G towards this step's Δh̄ and Δ∂h̄, where these say something.

    They say nothing where they are not finite, and where Δ∂h̄ is below the rounding error of ∂h̄: before a
    BatchNorm layer in training mode ∂h̄ = 0, and H_G would learn noise.

    Returns:
        (s_G, y_G) scaled by one common number, each [L, *B, d_out], and where they are news, bool [L, *B, 1].
    """
    before, after = ([m[KBFGSQuantities] for m in measured] for measured in (seen.first, seen.second))
    s = stack(m.h_bar for m in after) - stack(m.h_bar for m in before)
    y = stack(m.dh_bar for m in after) - stack(m.dh_bar for m in before)
    noise = stack(m.dh_noise for m in after) + stack(m.dh_noise for m in before)
    news = (dot(y, y) > dot(noise, noise)) & torch.isfinite(dot(s, s) + dot(y, y)) & seen.finite
    s, y = (_move(states, name, value, news, decay) for name, value in (("s_G", s), ("y_G", y)))
    return *common_scale(s, y), news


def _move(states: Sequence[State], name: str, value: Tensor, news: Tensor, decay: float) -> Tensor:
    average = read(states, name)
    average = flush_(torch.where(news, torch.lerp(value, average, decay), average))
    write(states, name, average)
    return average


@dataclass(frozen=True)
class SecantBFGS(Secant):
    """BFGS on H_G."""

    learned: ClassVar[tuple[str, ...]] = ("H_G",)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        state["H_G"] = torch.diag_embed(self.initial(damping).unsqueeze(-1).expand_as(like)).contiguous()
        self._start_pairs(state, like, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        growth = self.unit.growth(states)
        if growth is not None:
            torch._foreach_div_([state["H_G"] for state in states], growth[..., None, None].unbind())
        s, y, damped = self._damped_pairs(states, seen, damping)
        kept = bfgs_update_each_([state["H_G"] for state in states], s, y)
        count(states, "pairs_seen_G", kept, kept & damped, ~kept & seen.finite)


@dataclass(frozen=True)
class SecantLBFGS(Secant):
    """L-BFGS on H_G in compact form, from H_G⁰ at each use.

    Attributes:
        history_size: p, how many pairs are kept.
    """

    history_size: int = 100

    def __post_init__(self) -> None:
        """Check the constants."""
        super().__post_init__()
        object.__setattr__(self, "history_size", checked_history_size(self.history_size))

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        start_pairs(state, "G", like, self.history_size, self.initial(damping))
        self._start_pairs(state, like, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        growth = self.unit.growth(states)
        if growth is not None:
            divide(states, "G", growth)
        s, y, damped = self._damped_pairs(states, seen, damping)
        kept = update_pairs(states, "G", s, y, self.initial(damping))
        count(states, "pairs_seen_G", kept, kept & damped, ~kept & seen.finite)

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return times_pairs(state, "G", M)
