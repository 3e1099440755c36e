"""The unit that an H_G of secant pairs counts in: that of the loss, or one that grows with the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kfqn_ext.linalg.splits import known_trace
from kfqn_ext.optim.inverses.base import State


class Unit(Protocol):
    """What the curvature of a pair is measured by."""

    def start(self, state: State) -> None:
        """Keep in a layer's state what the unit is told by."""

    def growth(self, states: Sequence[State]) -> Tensor | None:
        """By what factor the unit has grown since the last pairs, [L, *B]; None where it never does."""


@dataclass(frozen=True)
class LossUnit:
    """The unit of the loss's second derivative, as in the paper: it stays as it is."""

    def start(self, state: State) -> None:  # noqa: D102
        pass

    def growth(self, states: Sequence[State]) -> Tensor | None:  # noqa: D102
        return None


@dataclass(frozen=True)
class LargestTrace:
    """The largest mean eigenvalue of Γ that a layer has had.

    Behind a last layer that starts almost at zero, gradients are small at first and grow by orders of magnitude. The
    inverses of the first pairs, and H_G⁰, are then as many orders too large beside those of later ones. Divided by
    what the unit has grown, they are not. Where gradients only fall, nothing is ever divided.
    """

    def start(self, state: State) -> None:
        """Keep the mean eigenvalue of the first minibatch's Γ.

        Raises:
            ValueError: If nothing measures it.
        """
        if "trace_G" not in state:
            raise ValueError(
                "This H_G counts in units of the largest tr(Γ), and nothing measures that. Use a split of the damping "
                "that reads traces, such as kfqn_ext.linalg.splits.relative, or unit=LossUnit()."
            )
        state["largest_trace_G"] = state["trace_G"].clone()

    def growth(self, states: Sequence[State]) -> Tensor | None:  # noqa: D102
        largest = torch.stack([state["largest_trace_G"] for state in states])
        now = torch.maximum(largest, torch.stack([state["trace_G"] for state in states]))
        torch._foreach_copy_([state["largest_trace_G"] for state in states], now.unbind())
        return known_trace(now) / known_trace(largest)
