"""H_A by BFGS along s = H_A ā with the exact action y = A s + λ_A s of a matrix that is known, ``eq_1``."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.linalg import bfgs_update_, damped_inverse
from kfqn_ext.optim.sides.base import InputSide, Kind, Seen, State, count, start_count, times
from kfqn_ext.optim.sides.moving_average import Decay, check_decay, move_towards
from kfqn_ext.optim.sides.pairs import check_memory, start_pairs, times_pairs, update_pairs


def _action(side: InputSide, state: State, seen: Seen, damping: Tensor) -> tuple[Tensor, Tensor]:
    """(s, A s + λ_A s) for this minibatch's A, which the pass that made the first H_A has formed instead of probing."""
    moments = seen.first.moments
    assert moments is not None
    s, A_s = moments.s, moments.A_s
    if s is None or A_s is None:
        s = side.precondition(state, moments.a_bar.unsqueeze(-2)).squeeze(-2)
        A_s = moments.A @ s if seen.first.A is None else times(seen.first.A, s)
    _note_leverage(state, s, seen)
    y = A_s + damping.unsqueeze(-1) * s
    return torch.where(seen.finite, s, 0.0), torch.where(seen.finite, y, 0.0)


def _note_leverage(state: State, s: Tensor, seen: Seen) -> None:
    """Keep |T| āᵀ H_A ā: at most 1 for every exact inverse, so how far above 1 it is tells how stale H_A is."""
    moments = seen.first.moments
    assert moments is not None
    leverage = (s * moments.a_bar).sum(-1) * moments.num_locations
    state["leverage"] = torch.where(seen.finite, leverage, state.get("leverage", torch.zeros_like(leverage)))


@dataclass(frozen=True)
class HessianAction(InputSide):
    """Hessian-action BFGS, "minibatched": A is this minibatch's and is never formed."""

    first: ClassVar[tuple[Kind, ...]] = ("moments",)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:  # noqa: D102
        state["H_A"] = damped_inverse(A, damping)
        start_count(state, "pairs_seen_A", damping)
        state["leverage"] = torch.zeros_like(damping)

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:  # noqa: D102
        # None in the very pass that measures A for the first H_A.
        return times(state["H_A"], a_bar) if "H_A" in state else None

    def learn(self, state: State, seen: Seen, damping: Tensor) -> None:  # noqa: D102
        kept = bfgs_update_(state["H_A"], *_action(self, state, seen, damping))
        count(state, "pairs_seen_A", kept, torch.zeros_like(kept), ~kept & seen.finite)


@dataclass(frozen=True)
class MovingHessianAction(HessianAction):
    """Hessian-action BFGS of K-BFGS-20: A is a moving average of the minibatches', formed and kept.

    Attributes:
        decay: β in A ← βA + (1 - β) A of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    decay: Decay = 0.9
    first: ClassVar[tuple[Kind, ...]] = ("moments", "gram")

    def __post_init__(self) -> None:
        """Check β."""
        check_decay(self.decay)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:  # noqa: D102
        super().start(state, A, damping)
        state["A"] = A

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:  # noqa: D102
        return None

    def learn(self, state: State, seen: Seen, damping: Tensor) -> None:  # noqa: D102
        moments, A = seen.first.moments, seen.first.A
        assert moments is not None and A is not None
        move_towards(state["A"], A, self.decay, seen)
        s = times(state["H_A"], moments.a_bar)
        _note_leverage(state, s, seen)
        s = torch.where(seen.finite, s, 0.0)
        kept = bfgs_update_(state["H_A"], s, times(state["A"], s) + damping.unsqueeze(-1) * s)
        count(state, "pairs_seen_A", kept, torch.zeros_like(kept), ~kept & seen.finite)


@dataclass(frozen=True)
class LimitedHessianAction(InputSide):
    """Minibatched Hessian action with L-BFGS: H_A from I / λ_A and the last p pairs, p d_in numbers.

    Attributes:
        memory: p.
    """

    memory: int = 100

    def __post_init__(self) -> None:
        """Check the memory."""
        check_memory(self.memory)

    first: ClassVar[tuple[Kind, ...]] = ("moments",)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:  # noqa: D102
        start_pairs(state, "A", A.diagonal(dim1=-2, dim2=-1), self.memory, 1.0 / damping)
        start_count(state, "pairs_seen_A", damping)
        state["leverage"] = torch.zeros_like(damping)

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:  # noqa: D102
        return times_pairs(state, "A", a_bar.unsqueeze(-1)).squeeze(-1) if "pairs_A" in state else None

    def learn(self, state: State, seen: Seen, damping: Tensor) -> None:  # noqa: D102
        kept = update_pairs(state, "A", *_action(self, state, seen, damping), 1.0 / damping)
        count(state, "pairs_seen_A", kept, torch.zeros_like(kept), ~kept & seen.finite)

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return times_pairs(state, "A", M.mT).mT
