"""The keywords that all members of the family share: name, type and default, once for all constructors."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from typing_extensions import TypedDict

_C = TypeVar("_C", bound=type)

# T of K-BFGS, and T₁ of KFAC, each under the name that its constructor has for it.
UPDATE_FREQS = ("curvature_update_freq", "stats_update_freq")


class Shared(TypedDict, total=False):
    """Keywords of every constructor, beside those whose default differs from class to class."""

    momentum: float
    weight_decay: float
    step_cap: float | None
    direction_dtype: torch.dtype | None
    second_pass_fraction: float
    reduction: str


DEFAULTS: Shared = {
    "momentum": 0.9,
    "weight_decay": 0.0,
    "step_cap": None,
    "direction_dtype": None,
    "second_pass_fraction": 1.0,
    "reduction": "mean",
}
BY_GROUP = ("momentum", "weight_decay", "direction_dtype")
"""Those that a parameter group can set."""


def complete(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of the shared keywords.

    Raises:
        TypeError: For a keyword that is none of them, as Python does.
    """
    for key in given:
        if key not in DEFAULTS:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}")
    return {**DEFAULTS, **given}


def shows_all_keywords(cls: _C) -> _C:
    """Give a class whose constructor takes ``**shared`` the signature with every shared keyword written out."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    _, *own, _ = signature.parameters.values()  # without self and **shared
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Shared.__annotations__[name]
        )
        for name, default in DEFAULTS.items()
    ]
    cls.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return cls


def update_freq(group: Mapping[str, Any]) -> int:
    """T: curvature is learned when the step k is a multiple of it."""
    return int(next(group[name] for name in UPDATE_FREQS if name in group))
