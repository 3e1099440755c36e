"""Numbers for a step that has to change nothing where the minibatch is not finite."""

from typing import Any

import torch
from torch import Tensor

Rate = float | Tensor


class Gate:
    """Chooses between two numbers by whether the batch is finite, without asking whether it is.

    Each is made once a step: on a GPU two launches a parameter would cost more than the step's arithmetic.
    """

    def __init__(self, finite: Tensor) -> None:
        """``finite``, bool [], says whether the batch is."""
        self.finite = finite
        self._chosen: dict[Any, tuple[Rate, Tensor]] = {}
        self._numbers: dict[Any, Tensor] = {}

    def choose(self, value: Rate, otherwise: float, like: Tensor) -> Tensor:
        """``value``, or ``otherwise`` where the batch is not finite: [], in the dtype in which it is used."""
        # A tensor counts by its identity, which is its own as long as the value is kept.
        key = (id(value) if isinstance(value, Tensor) else value, otherwise, like.dtype, like.device)
        if key not in self._chosen:
            # Not masked_fill, for which a GPU makes the host wait where the value is a tensor.
            chosen = value.reshape(()).to(like) if isinstance(value, Tensor) else self._number(value, like)
            other = self._number(otherwise, like)
            self._chosen[key] = value, torch.where(self.finite.to(like.device), chosen, other)
        return self._chosen[key][1]

    def closed(self, like: Tensor) -> Tensor:
        """Whether the batch is not finite, bool [], where a tensor is."""
        return ~self.finite.to(like.device)

    def _number(self, value: float, like: Tensor) -> Tensor:
        key = value, like.dtype, like.device
        if key not in self._numbers:
            self._numbers[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._numbers[key]
