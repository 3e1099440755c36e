"""Errors that a caller may want to tell apart from any other."""


class UnsupportedLayerError(NotImplementedError):
    """A layer cannot be measured as ``h_t = W a_t``; the message says which, why and what to do instead."""


class MissingQuantitiesError(RuntimeError):
    """A quantity was asked for that no backward pass has produced."""
