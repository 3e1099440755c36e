"""What a minibatch brings to a step, which has to change nothing where the minibatch is not finite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfqn_ext._torch import is_on_host

Rate = float | Tensor


class Gate:
    """Lets a minibatch through where it is finite, and nothing of it where it is not.

    On a CPU the host sees whether it is. A GPU's host must not wait for that: numbers are chosen on the device, each
    once a step, since two launches a parameter would cost more than the step's arithmetic.
    """

    def __init__(self, finite: Tensor) -> None:
        """``finite``, bool [], says whether the batch is."""
        self.finite = finite
        self._is_open = bool(finite) if is_on_host(finite) else None
        self._chosen: dict[Any, tuple[Rate, Tensor]] = {}
        self._numbers: dict[Any, Tensor] = {}

    def choose(self, value: Rate, otherwise: float, like: Tensor) -> Rate:
        """``value``, or ``otherwise`` where the batch is not finite: a number on a CPU, else [] where ``like`` is."""
        if self._is_open is None:
            return self._choose_on_device(value, otherwise, like)
        return float(value) if self._is_open else otherwise

    def _choose_on_device(self, value: Rate, otherwise: float, like: Tensor) -> Tensor:
        if isinstance(value, Tensor) and is_on_host(value):
            value = float(value)  # to copy it to the device would have the host wait
        # A tensor counts by its identity, which is its own as long as the value is kept.
        key = (id(value) if isinstance(value, Tensor) else value, otherwise, like.dtype, like.device)
        if key not in self._chosen:
            # Not masked_fill, for which a GPU makes the host wait where the value is a tensor.
            chosen = value.reshape(()).to(like) if isinstance(value, Tensor) else self._number(value, like)
            other = self._number(otherwise, like)
            self._chosen[key] = value, torch.where(self.finite.to(like.device), chosen, other)
        return self._chosen[key][1]

    def gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """These, or zeros where the batch is not finite."""
        if self._is_open is not None:
            return grads if self._is_open else [torch.zeros_like(grad) for grad in grads]
        # 0 · NaN is NaN; and of a batch that is not finite the other gradients don't count either.
        cleared = [torch.nan_to_num(grad) for grad in grads]
        torch._foreach_mul_(cleared, self._choose_on_device(1.0, 0.0, cleared[0]))
        return cleared

    def kept(self, before: Tensor, after: Tensor) -> Tensor:
        """What of a state is ``after`` the minibatch; ``before`` where that is not finite."""
        if self._is_open is not None:
            return after if self._is_open else before
        return torch.where(self.closed(after), before, after)

    def closed(self, like: Tensor) -> Tensor:
        """Whether the batch is not finite, bool [], where a tensor is."""
        return ~self.finite.to(like.device)

    def numbers(self, values: Tensor) -> Sequence[Any]:
        """The entries of a vector, each to be multiplied with: numbers where the host has them, else [] each."""
        return values.unbind() if self._is_open is None else values.tolist()

    def scaled(self, values: Tensor, factors: Sequence[float]) -> Tensor:
        """Each entry of a vector times a number of the host, without a copy that a device would wait for."""
        if len(set(factors)) == 1:
            return values * factors[0]
        if self._is_open is not None:
            return values * values.new_tensor(factors)
        return torch.stack(torch._foreach_mul(values.unbind(), list(factors)))

    def _number(self, value: float, like: Tensor) -> Tensor:
        key = value, like.dtype, like.device
        if key not in self._numbers:
            self._numbers[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._numbers[key]
