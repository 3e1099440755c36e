"""H_G by BFGS or L-BFGS on moving averages of (Δh̄, Δ∂h̄), ``eq_6`` and ``eq_7``, with double damping."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext.linalg import bfgs_update_, compact_middle, compact_product, powell_lm, push_pair
from kfqn_ext.linalg.pairs import common_scale, dot
from kfqn_ext.optim.sides.base import Seen, State

PairDamping = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def _average_pair(state: State, seen: Seen, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Move s_G and y_G towards this step's Δh̄ and Δ∂h̄, where these say something.

    They say nothing where they are not finite, and where Δ∂h̄ is below the rounding error of ∂h̄: before a
    BatchNorm layer in training mode ∂h̄ = 0, and H_G would learn noise.

    Returns:
        (s_G, y_G) scaled by one common number, each [*B, d_out], and where they are news, bool [*B, 1].
    """
    assert seen.second is not None
    s, y = seen.second.h_bar - seen.first.h_bar, seen.second.dh_bar - seen.first.dh_bar
    noise = seen.second.dh_noise + seen.first.dh_noise
    news = (dot(y, y) > dot(noise, noise)) & torch.isfinite(dot(s, s) + dot(y, y))
    for name, value in (("s_G", s), ("y_G", y)):
        state[name].copy_(torch.where(news, torch.lerp(value, state[name], decay), state[name]))
    return *common_scale(state["s_G"], state["y_G"]), news


def _where_news(s: Tensor, y: Tensor, news: Tensor) -> tuple[Tensor, Tensor]:
    """Empty the pairs that are no news; an empty pair changes nothing."""
    return torch.where(news, s, 0.0), torch.where(news, y, 0.0)


@dataclass(frozen=True)
class DenseSecant:
    """BFGS on H_G, starting from I / λ_G.

    Attributes:
        pair_damping: Damps (s, y) given H y, μ₁ and μ₂ = λ_G.
        mu1: μ₁ of Powell's damping.
        decay: β of the moving averages.
    """

    pair_damping: PairDamping = powell_lm
    mu1: float = 0.2
    decay: float = 0.9
    needs_second_pass = True

    def start(self, state: State, a_row: Tensor, damping: float) -> None:  # noqa: D102
        state["H_G"] = torch.diag_embed(torch.full_like(a_row, 1.0 / damping))
        state["s_G"], state["y_G"] = torch.zeros_like(a_row), torch.zeros_like(a_row)

    def learn(self, state: State, seen: Seen, damping: float) -> Tensor:  # noqa: D102
        H = state["H_G"]
        s, y, news = _average_pair(state, seen, self.decay)
        s, y = self.pair_damping(s, y, (H @ y.unsqueeze(-1)).squeeze(-1), self.mu1, damping)
        return bfgs_update_(H, *_where_news(s, y, news))

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return state["H_G"] @ M


@dataclass(frozen=True)
class LimitedSecant:
    """L-BFGS on H_G in compact form, starting from I / λ_G at each use.

    Attributes:
        memory: p, how many pairs are kept.
        pair_damping: Damps (s, y) given H y, μ₁ and μ₂ = λ_G.
        mu1: μ₁ of Powell's damping.
        decay: β of the moving averages.
    """

    memory: int = 100
    pair_damping: PairDamping = powell_lm
    mu1: float = 0.2
    decay: float = 0.9
    needs_second_pass = True

    def start(self, state: State, a_row: Tensor, damping: float) -> None:  # noqa: D102
        *blocks, d = a_row.shape
        state["pairs"] = a_row.new_zeros(*blocks, 2 * self.memory, d)
        state["K"] = a_row.new_zeros(*blocks, 2 * self.memory, 2 * self.memory)
        state["gamma"] = a_row.new_full(blocks, 1.0 / damping)
        state["s_G"], state["y_G"] = torch.zeros_like(a_row), torch.zeros_like(a_row)

    def learn(self, state: State, seen: Seen, damping: float) -> Tensor:  # noqa: D102
        s, y, news = _average_pair(state, seen, self.decay)
        s, y = self.pair_damping(s, y, self.precondition(state, y.unsqueeze(-1)).squeeze(-1), self.mu1, damping)
        state["gamma"].fill_(1.0 / damping)
        pairs, kept = push_pair(state["pairs"], *_where_news(s, y, news), norm_H=state["gamma"].unsqueeze(-1))
        state["pairs"] = pairs
        state["K"] = compact_middle(pairs, state["gamma"])
        return kept

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return compact_product(state["pairs"], state["K"], state["gamma"], M)
