"""How a model is called: on one input, on several in their order, or on several by their names."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tuple or list is several inputs, a mapping several by name, all else is one.

    A tuple with names, as a ``PackedSequence``, is one. A single tuple, list or mapping is given as ``(x,)``.
    """
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if type(x) in (tuple, list) else ((x,), {})


def call(model: nn.Module, x: Any) -> Any:
    """The model's output.

    Raises:
        TypeError: If the model takes no such inputs; beside what it raises itself.
    """
    args, kwargs = arguments(x)
    with explained(model, x):
        return model(*args, **kwargs)


@contextmanager
def explained(model: nn.Module, x: Any) -> Iterator[None]:
    """Say how a model is called in the body, where that is why it fails (TypeError)."""
    try:
        yield
    except TypeError as error:
        args, kwargs = arguments(x)
        if _takes(model, args, kwargs):
            raise
        found = f"by the names {', '.join(map(str, kwargs))}" if kwargs else f"on {len(args)} inputs"
        raise TypeError(
            f"{type(model).__name__} was called {found}, and its forward takes {inspect.signature(model.forward)}: a "
            "mapping is several inputs by name, and a tuple or list several in their order. Give a single one of these "
            "as (x,)."
        ) from error


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model's ``forward`` takes such inputs, for all that is known of it."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a function that was not written in Python
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
