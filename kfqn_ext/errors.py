"""Errors that a caller may want to tell apart from any other, and how a message lists names."""

from collections.abc import Sequence

__all__ = ["MissingQuantitiesError", "UnsupportedLayerError"]


class UnsupportedLayerError(NotImplementedError):
    """A layer cannot be measured as ``h_t = W a_t``; the message says which, why and what to do instead."""


class MissingQuantitiesError(RuntimeError):
    """A quantity was asked for that no backward pass has produced."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"
