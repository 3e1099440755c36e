"""What an optimizer asks of the two sides of a layer's block, and what it shows them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kfqn_ext.extensions import LayerMoments

State = dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """What was measured of one layer around one step.

    Attributes:
        first: Moments in the pass before the step.
        second: Moments in the pass over the same minibatch after it, or None where the recipe has none.
        A: This minibatch's A, [*B, d_in, d_in], or None where nothing asked for it.
    """

    first: LayerMoments
    second: LayerMoments | None = None
    A: Tensor | None = None


class InputSide(Protocol):
    """H_A, an approximate inverse of A + λ_A I, in a layer's state."""

    needs_gram: bool
    """Whether ``learn`` needs this minibatch's A, formed."""

    def start(self, state: State, A: Tensor, damping: float) -> None:
        """Make the initial H_A from the data set's A, or the first minibatch's."""

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:
        """Choose the direction s for which A s is wanted from the first pass; None for none."""

    def learn(self, state: State, seen: Seen, damping: float) -> Tensor:
        """Update H_A in place; return which of [*B] changed."""

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """M H_A: [*B, d_out, d_in]."""


class OutputSide(Protocol):
    """H_G, an approximate inverse of G + λ_G I, in a layer's state."""

    needs_second_pass: bool
    """Whether ``learn`` needs the moments of a second pass."""

    def start(self, state: State, a_row: Tensor, damping: float) -> None:
        """Make the initial H_G; ``a_row``, [*B, d_out], gives shape, dtype and device."""

    def learn(self, state: State, seen: Seen, damping: float) -> Tensor:
        """Update H_G in place; return which of [*B] changed."""

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """H_G M: [*B, d_out, d_in]."""
