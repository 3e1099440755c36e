"""The keywords that all members of the family share: name, type and default, once for all constructors."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from typing_extensions import TypedDict

_C = TypeVar("_C", bound=type)

# T of K-BFGS, and T₁ of KFAC, each under the name that its constructor has for it.
UPDATE_FREQS = ("curvature_update_freq", "stats_update_freq")


class Shared(TypedDict, total=False):
    """Keywords of every constructor, beside those whose default differs from class to class."""

    weight_decay: float
    step_cap: float | None
    direction_dtype: torch.dtype | None
    second_pass_fraction: float
    reduction: str
    process_group: ProcessGroup | None
    shard_state: bool


DEFAULTS: Shared = {
    "weight_decay": 0.0,
    "step_cap": None,
    "direction_dtype": None,
    "second_pass_fraction": 1.0,
    "reduction": "mean",
    "process_group": None,
    "shard_state": False,
}
BY_GROUP = ("weight_decay", "direction_dtype")
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
    """Give a class whose constructors take ``**shared`` signatures with every shared keyword written out."""
    signature = _with_shared(inspect.signature(cls.__init__))  # type: ignore[misc]
    _, *own = signature.parameters.values()  # without self
    cls.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    other = vars(cls).get("as_printed")
    if isinstance(other, classmethod) and _takes_shared(inspect.signature(other.__func__)):
        other.__func__.__signature__ = _with_shared(inspect.signature(other.__func__))  # type: ignore[attr-defined]
    return cls


def _takes_shared(signature: inspect.Signature) -> bool:
    return any(p.annotation is not p.empty and "Shared" in str(p.annotation) for p in signature.parameters.values())


def _with_shared(signature: inspect.Signature) -> inspect.Signature:
    """A signature that ends with ``**shared``, with its keywords in place of that."""
    *own, _ = signature.parameters.values()
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Shared.__annotations__[name]
        )
        for name, default in DEFAULTS.items()
    ]
    return signature.replace(parameters=[*own, *shared])


def update_freq(group: Mapping[str, Any]) -> int:
    """T: curvature is learned when the step k is a multiple of it."""
    return int(next(group[name] for name in UPDATE_FREQS if name in group))
