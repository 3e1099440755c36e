"""Numbers as people have them, of NumPy's or of torch's, as numbers of Python's: what a checkpoint can hold."""

from numbers import Integral, Real
from operator import index
from typing import Any

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
