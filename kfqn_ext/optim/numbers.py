"""Numbers as people have them: of NumPy's or torch's as ones of Python's, and complex ones as pairs of real ones."""

from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch import Tensor


def number(value: Any) -> Any:
    """A number of Python's for one of NumPy's, or for what holds a single one; anything else as it is."""
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    holds_one = value.numel() == 1 if isinstance(value, Tensor) else getattr(value, "shape", None) == ()
    return value.item() if holds_one and hasattr(value, "item") else value


def integer(value: Any) -> Any:
    """An integer of Python's for whatever counts as one, but for truth values; anything else as it is."""
    value = number(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return index(value)


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return type(value) is int and value >= 1


def as_real(t: Tensor) -> Tensor:
    """A complex tensor as a view of its real and imaginary parts, [..., 2]; a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
