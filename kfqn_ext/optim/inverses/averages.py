"""The moving average of a factor over minibatches, with a weight β that may depend on the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from kfqn_ext._torch import is_on_host
from kfqn_ext.linalg import flush_
from kfqn_ext.optim.inverses.base import Seen

Decay = float | Callable[[int], float]
"""β in A ← βA + (1 - β) A of this minibatch, or a function of the step k = 1, 2, …; at 1 the average stays."""


def check_decay(decay: Decay) -> None:
    """Raise a ValueError where β is none, at the first step if it is a function."""
    beta = decay_at(decay, 1)
    if not isinstance(beta, int | float) or not 0 <= beta <= 1:
        found = f"{beta!r} at step 1" if callable(decay) else repr(beta)
        raise ValueError(f"Invalid decay: {found}. It must be a number β with 0 <= β <= 1, or a function k ↦ β.")


def move_towards(average: Tensor, value: Tensor, decay: Decay, seen: Seen) -> None:
    """Move: average ← β average + (1 - β) value, ``line_3`` of ``algo_1``, where the value is finite."""
    flush_(average.lerp_(where_finite(value, seen, average), 1.0 - decay_at(decay, seen.step)))


def where_finite(value: Tensor, seen: Seen, otherwise: Tensor) -> Tensor:
    """Matrices, [*B, d, d], where the sum of their entries and the minibatch are finite; elsewhere others."""
    # What is not finite makes a sum that is not. To look at each entry takes ten times as long.
    finite = torch.isfinite(value.sum((-2, -1), keepdim=True)) & seen.finite
    if is_on_host(finite) and bool(finite.all()):
        return value  # without a copy
    return torch.where(finite, value, otherwise)


def decay_at(decay: Decay, step: int) -> float:
    """β at a step."""
    return decay(step) if callable(decay) else decay
