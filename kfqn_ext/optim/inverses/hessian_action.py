"""H_A by BFGS along s = H_A ā with the exact action y = A s + λ_A s of a matrix that is known, ``eq_1``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.extensions import InputGram, InputMoments, InputQuantities
from kfqn_ext.linalg import bfgs_updates_each_, damped_inverse, few_columns
from kfqn_ext.linalg.padded import stack, times, times_each
from kfqn_ext.linalg.pairs import dot
from kfqn_ext.optim.inverses.averages import Decay, check_decay, decay_at, move_towards
from kfqn_ext.optim.inverses.base import (
    Direction,
    InputInverse,
    Kinds,
    Measured,
    Seen,
    State,
    check_num_random,
    count,
    pairs_first,
    random_columns,
    start_count,
    unit_columns,
)
from kfqn_ext.optim.inverses.lbfgs import checked_history_size, start_pairs, times_pairs, update_pairs


def _looked_at(states: Sequence[State], seen: Seen, damping: Tensor) -> tuple[list[State], Seen, Tensor]:
    """The same without layers whose first H_A was made from this very A: it maps every y = A s + λ_A s to its s."""
    known = [i for i, measured in enumerate(seen.first) if measured[InputQuantities].s is not None]
    if len(known) in (0, len(states)):
        return list(states) if known else [], seen, damping
    first, second = ([measured[i] for i in known] for measured in (seen.first, seen.second))
    seen = replace(seen, first=first, second=second)
    return [states[i] for i in known], seen, torch.stack([damping[i] for i in known])


def _products(seen: Seen) -> tuple[Tensor, Tensor]:
    """(s, A s) of each layer, [L, *B, d], or of several directions, [L, *B, d, k]."""
    moments = [measured[InputQuantities] for measured in seen.first]
    return stack(m.s for m in moments if m.s is not None), stack(m.A_s for m in moments if m.A_s is not None)


def _damped(s: Tensor, A_s: Tensor, seen: Seen, damping: Tensor) -> tuple[Tensor, Tensor]:
    """(s, A s + λ_A s), empty where the minibatch is not finite."""
    y = A_s + damping.unsqueeze(-1) * s
    return torch.where(seen.finite, s, 0.0), torch.where(seen.finite, y, 0.0)


def _note_leverage(states: Sequence[State], s: Tensor, seen: Seen) -> None:
    """Keep |T| āᵀ H_A ā: at most 1 for every exact inverse, so how far above 1 it is tells how stale H_A is."""
    moments = [measured[InputQuantities] for measured in seen.first]
    products = dot(s, stack(m.a_bar for m in moments)).squeeze(-1)
    leverage = torch.stack(torch._foreach_mul(products.unbind(), [float(m.num_locations) for m in moments]))
    kept = [state["leverage"] for state in states]
    torch._foreach_copy_(kept, torch.where(seen.finite, leverage, torch.stack(kept)).unbind())


def _first_leverage(H_A: Tensor, measured: Measured) -> Tensor:
    """The same where H_A has just been made from this A; zero where ā was not measured."""
    moments: InputMoments | None = measured.get(InputQuantities)
    if moments is None:
        return H_A.new_zeros(H_A.shape[:-2])
    a_bar, T = moments.a_bar, moments.num_locations
    return dot(times(H_A, a_bar), a_bar).squeeze(-1) * T


def _update(states: Sequence[State], s: Tensor, y: Tensor, seen: Seen) -> None:
    """Update each dense H_A by its pairs (s, y), [k, L, *B, d], one after the other."""
    kept = bfgs_updates_each_([state["H_A"] for state in states], s, y)
    count(states, "pairs_seen_A", kept.sum(0), torch.zeros_like(kept[0]), (~kept & seen.finite).sum(0))


@dataclass(frozen=True)
class HessianAction(InputInverse):
    """Hessian-action BFGS, "minibatched", ``sec_13``: A is this minibatch's, and is formed for the first H_A alone."""

    first: ClassVar[Kinds] = (InputQuantities,)
    learned: ClassVar[tuple[str, ...]] = ("H_A",)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        assert measured.A is not None
        state["H_A"] = damped_inverse(measured.A, damping)
        start_count(state, "pairs_seen_A", damping)
        state["leverage"] = _first_leverage(state["H_A"], measured)

    def probe(self, state: State, a_bar: Tensor, step: int) -> Direction | None:  # noqa: D102
        # None in the very pass that measures A for the first H_A.
        return (times(state["H_A"], a_bar), None) if "H_A" in state else None

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        states, seen, damping = _looked_at(states, seen, damping)
        if states:
            s, A_s = _products(seen)
            _note_leverage(states, s, seen)
            s, y = _damped(s, A_s, seen, damping)
            _update(states, s.unsqueeze(0), y.unsqueeze(0), seen)


@dataclass(frozen=True)
class StepHessianAction(HessianAction):
    """Hessian-action BFGS in several directions s = H_A v, averaged: :class:`FisherAction` for the other factor.

    The first v is ā, so that s is the one of ``algo_8``. The second is the direction of inputs for which the last step
    was longest: where it sets the length of a step, an H_A that is too large there shortens all others. The rest are
    random combinations of M's rows, so that H_A is right where it is used. The last two are not in the paper, and
    neither is the average. A of one minibatch has a rank of |T| times its size at most, and a wide layer's H_A would
    follow its noise.

    H_A⁻¹ s = v is known for the H_A that the pass has met. So y = β v + (1 - β) (A s + λ_A s) makes H_A⁻¹ s what a
    moving average of A + λ_A I would have there.

    Attributes:
        decay: β, or k ↦ β.
        num_random: How many directions are random; they depend on the step's number alone.
    """

    decay: Decay = 0.75
    num_random: int = 3

    def __post_init__(self) -> None:
        """Check both."""
        check_decay(self.decay)
        check_num_random(self.num_random)

    def probe(self, state: State, a_bar: Tensor, step: int) -> Direction | None:  # noqa: D102
        if "H_A" not in state:
            return None
        u = state.get("u")  # kept by a rule that sets the length; else zero, which is no pair
        v = torch.zeros_like(a_bar) if u is None else u.to(a_bar.dtype)
        random = unit_columns(random_columns(state["momentum"].mT, self.num_random, step)).to(a_bar.dtype)
        V = torch.cat((a_bar.unsqueeze(-2), v.unsqueeze(-2), random.mT), dim=-2).mT
        return few_columns.product(state["H_A"], V), V

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        states, seen, damping = _looked_at(states, seen, damping)
        if states:
            s, y = self._averaged(seen, damping)
            _note_leverage(states, s[0], seen)
            _update(states, s, y, seen)

    def _averaged(self, seen: Seen, damping: Tensor) -> tuple[Tensor, Tensor]:
        """(s, β v + (1 - β) (A s + λ_A s)) for all directions, [k, L, *B, d]; what they are made of is let go."""
        s, A_s = map(pairs_first, _products(seen))
        s, y = _damped(s, A_s, seen, damping)
        v = pairs_first(stack(kept for m in seen.first if (kept := m[InputQuantities].kept) is not None))
        return s, torch.lerp(y, torch.where(seen.finite, v, 0.0), decay_at(self.decay, seen.step))


@dataclass(frozen=True)
class MovingHessianAction(HessianAction):
    """Hessian-action BFGS of K-BFGS-20: A is a moving average of the minibatches', formed and kept.

    Attributes:
        decay: β in A ← βA + (1 - β) A of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    decay: Decay = 0.9
    first: ClassVar[Kinds] = (InputQuantities, InputGram)

    def __post_init__(self) -> None:
        """Check β."""
        check_decay(self.decay)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        super().start(state, like, measured, damping)
        assert measured.A is not None
        state["A"] = measured.A

    def probe(self, state: State, a_bar: Tensor, step: int) -> Direction | None:  # noqa: D102
        return None

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured in zip(states, seen.first, strict=True):
            move_towards(state["A"], measured[InputGram].A, self.decay, seen)
        inverses = [state["H_A"] for state in states]
        s = times_each(inverses, stack(measured[InputQuantities].a_bar for measured in seen.first))
        _note_leverage(states, s, seen)
        s = torch.where(seen.finite, s, 0.0)
        y = times_each([state["A"] for state in states], s) + damping.unsqueeze(-1) * s
        _update(states, s.unsqueeze(0), y.unsqueeze(0), seen)


@dataclass(frozen=True)
class HessianActionLBFGS(InputInverse):
    """Minibatched Hessian action with L-BFGS: H_A from I / λ_A and the last p pairs, p d_in numbers.

    Attributes:
        history_size: p.
    """

    history_size: int = 100

    def __post_init__(self) -> None:
        """Check p."""
        object.__setattr__(self, "history_size", checked_history_size(self.history_size))

    first: ClassVar[Kinds] = (InputQuantities,)
    starts_from: ClassVar[Kinds] = (InputQuantities,)  # of which it needs |T| alone: A is not formed

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        start_pairs(state, "A", like, self.history_size, 1.0 / damping)
        start_count(state, "pairs_seen_A", damping)
        state["leverage"] = torch.zeros_like(damping)

    def probe(self, state: State, a_bar: Tensor, step: int) -> Direction | None:  # noqa: D102
        if "pairs_A" in state:
            return times_pairs(state, "A", a_bar.unsqueeze(-1)).squeeze(-1), None
        return a_bar, a_bar  # in a layer's first pass along ā itself, before its H_A = γI is known

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        s, A_s = (stack(vectors) for vectors in zip(*map(self._product, states, seen.first), strict=True))
        _note_leverage(states, s, seen)
        kept = update_pairs(states, "A", *_damped(s, A_s, seen, damping), 1.0 / damping)
        count(states, "pairs_seen_A", kept, torch.zeros_like(kept), ~kept & seen.finite)

    def _product(self, state: State, measured: Measured) -> tuple[Tensor, Tensor]:
        """(s, A s) of one layer."""
        moments = measured[InputQuantities]
        assert moments.s is not None
        assert moments.A_s is not None
        if moments.kept is None:
            return moments.s, moments.A_s
        gamma = state["gamma_A"].unsqueeze(-1)
        return gamma * moments.s, gamma * moments.A_s

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return times_pairs(state, "A", M.mT).mT
