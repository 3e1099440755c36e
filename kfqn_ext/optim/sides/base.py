"""What an optimizer asks of the two sides of a layer's block, and what it shows them.

A side is a rule without state of its own: what it learns is in the layer's state, a dictionary of tensors. Dampings
come as tensors [*B]. L layers of one device, dtype and *B learn together, as each operation on vectors is then one for
all of them: their vectors come stacked, [L, *B, d], padded with zeros to the longest (:mod:`kfqn_ext.linalg.padded`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kfqn_ext.extensions import Gram, KroneckerFactors, LayerMoments, Traces
from kfqn_ext.linalg.padded import stack, unstack

State = dict[str, Tensor]
Kind = Literal["moments", "gram", "factors", "power"]


@dataclass(frozen=True)
class Measured:
    """What the extensions measured of one layer in one pass; None where nothing asked for it."""

    moments: LayerMoments | None = None
    gram: Gram | None = None
    factors: KroneckerFactors | None = None
    power: Traces | None = None

    @property
    def A(self) -> Tensor | None:
        """This minibatch's A where it was formed, [*B, d_in, d_in]."""
        return self.gram.A if self.gram is not None else None if self.factors is None else self.factors.Omega

    @property
    def num_locations(self) -> float | None:
        """|T|."""
        return next((m.num_locations for m in (self.moments, self.gram, self.factors) if m is not None), None)


@dataclass(frozen=True)
class Seen:
    """What was measured of several layers in the two passes over a minibatch.

    Attributes:
        first: In the first pass, of one layer each.
        second: In the second pass.
        finite: Whether all gradients of the minibatch were finite, bool []; nothing is learned from others.
        step: k of the step that the minibatch is of, from 1.
    """

    first: Sequence[Measured]
    second: Sequence[Measured]
    finite: Tensor
    step: int


class Side:
    """What both sides have in common; by default there is nothing to measure and nothing to refresh."""

    first: ClassVar[tuple[Kind, ...]] = ()
    """What ``learn`` needs from the first pass."""
    second: ClassVar[tuple[Kind, ...]] = ()
    """What ``learn`` needs from the second pass."""
    starts_from: ClassVar[tuple[Kind, ...]] = ()
    """What ``start`` needs from a pass."""

    def refresh(self, state: State, damping: Tensor) -> None:
        """Recompute what is not updated with every pair; when the inverse update is due."""

    def power(self, state: State) -> Tensor | None:
        """Mean eigenvalue of the factor, [*B], where the side knows it."""
        return None


class InputSide(Side):
    """H_A, an approximate inverse of A + λ_A I, in a layer's state."""

    starts_from: ClassVar[tuple[Kind, ...]] = ("gram",)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:
        """Make the initial H_A from the data set's A, or the first minibatch's; A may be kept."""
        raise NotImplementedError

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:
        """Choose the direction s for which A s is wanted from the first pass; None for none."""
        return None

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        """Update H_A of L layers; their dampings are [L, *B]."""
        raise NotImplementedError

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """M H_A: [*B, d_out, d_in], in the dtype of what the state holds."""
        return M.to(state["H_A"].dtype) @ state["H_A"]


class OutputSide(Side):
    """H_G, an approximate inverse of G + λ_G I, in a layer's state."""

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:
        """Make the initial H_G; ``like``, [*B, d_out], gives shape, dtype and device."""
        raise NotImplementedError

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        """Update H_G of L layers; their dampings are [L, *B]."""
        raise NotImplementedError

    def where_shifts_are_removed(self) -> "OutputSide | None":
        """What this side comes to, at less cost, where ∂h̄ = 0; None where it learns from more than ∂h̄."""
        return None

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """H_G M: [*B, d_out, d_in], in the dtype of what the state holds."""
        return state["H_G"] @ M.to(state["H_G"].dtype)


def moments_of(measured: Sequence[Measured]) -> list[LayerMoments]:
    """The moments of layers that were all measured."""
    return [m.moments for m in measured if m.moments is not None]


def read(states: Sequence[State], key: str) -> Tensor:
    """A vector of each state, stacked: [L, *B, d]."""
    return stack(state[key] for state in states)


def write(states: Sequence[State], key: str, value: Tensor) -> None:
    """Write stacked vectors back into each state, in place."""
    vectors = [state[key] for state in states]
    torch._foreach_copy_(vectors, unstack(value, [v.shape[-1] for v in vectors]))


def count(states: Sequence[State], key: str, *events: Tensor) -> None:
    """Add up which of [L, *B] had each event, in each state's counter under ``key``: int64 [len(events), *B]."""
    happened = torch.stack(events, dim=1).to(torch.int64)
    torch._foreach_add_([state[key] for state in states], happened.unbind())


def start_count(state: State, key: str, like: Tensor) -> None:
    """Set the three counters of pairs (kept, damped, skipped) to zero; ``like`` has the shape [*B]."""
    state[key] = torch.zeros(3, *like.shape, dtype=torch.int64, device=like.device)


def times(H: Tensor, v: Tensor) -> Tensor:
    """H v: [*B, d, d], [*B, d] → [*B, d]."""
    return (H @ v.unsqueeze(-1)).squeeze(-1)
