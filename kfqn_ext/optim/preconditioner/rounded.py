"""The direction from rounded copies of the inverses: a fraction of its cost, with inverses as precise as ever."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext._torch import multiplies_bfloat16
from kfqn_ext.optim.inverses import State

_SLOW = (
    "direction_dtype=torch.bfloat16: the layers' device has no arithmetic for it, and would take dozens of times as "
    "long as in float32. Directions are computed as with direction_dtype=None, which is what to write for this device."
)


@dataclass(frozen=True)
class _Copy:
    """A copy, and of which tensor it was made, after how many writes to it."""

    value: Tensor
    source: weakref.ref[Tensor]
    writes: int


class RoundedInverses:
    """Copies of dense inverses in another dtype, renewed when an inverse has changed since.

    They are not part of the state: a checkpoint holds the inverses, and copies are made from those again.
    """

    def __init__(self, warn_once: Callable[[str], None]) -> None:
        """Hold no copies yet, and give remarks to ``warn_once``."""
        self._warn_once = warn_once
        self._copies: dict[tuple[Tensor, str], _Copy] = {}

    def view(self, weight: Tensor, state: State, dtype: torch.dtype | None) -> State:
        """A layer's state with rounded copies in place of its dense inverses.

        The state itself where dtype is None, and where the device is slower in that dtype.
        """
        if dtype is None:
            return state
        if dtype == torch.bfloat16 and not multiplies_bfloat16(weight.device):
            self._warn_once(_SLOW)
            return state
        rounded: State = {key: self._rounded(weight, key, state[key], dtype) for key in ("H_A", "H_G") if key in state}
        return {**state, **rounded}

    def _rounded(self, weight: Tensor, key: str, H: Tensor, dtype: torch.dtype) -> Tensor:
        if H.dtype == dtype:
            return H
        old = self._copies.get((weight, key))
        if old is not None and old.value.dtype == dtype and old.value.shape == H.shape and old.value.device == H.device:
            if old.source() is H and old.writes == H._version:
                return old.value
            value = old.value.copy_(H)
        else:
            value = H.to(dtype)
        self._copies[weight, key] = _Copy(value, weakref.ref(H), H._version)
        return value
