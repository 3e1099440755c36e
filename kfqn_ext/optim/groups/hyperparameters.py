"""The keywords that all members of the family share: name, type and default, once for all constructors."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from typing_extensions import TypedDict

from kfqn_ext.optim.groups.sentences import complete_args

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
    """Write out what constructors share: every keyword in their signatures, and a sentence for each in docstrings."""
    constructors: list[Any] = [vars(c).get("__init__") for c in cls.__mro__]
    family = [init for init in constructors if hasattr(init, "__signature__")]  # those that went through here
    docstring = (family or constructors)[0].__doc__ or ""
    other = vars(cls).get("as_printed")
    for make in (constructors[0], getattr(other, "__func__", None)):
        if make is not None and "shared" in inspect.signature(make).parameters:
            _write_out(make, docstring)
    return cls


def _write_out(make: Any, docstring: str) -> None:
    first, *own, _ = inspect.signature(make).parameters.values()  # without **shared
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Shared.__annotations__[name]
        )
        for name, default in DEFAULTS.items()
    ]
    make.__signature__ = inspect.signature(make).replace(parameters=[first, *own, *shared])
    make.__doc__ = complete_args(make.__doc__ or "", docstring, [parameter.name for parameter in (*own, *shared)])


def update_freq(group: Mapping[str, Any]) -> int:
    """T: curvature is learned when the step k is a multiple of it."""
    return int(next(group[name] for name in UPDATE_FREQS if name in group))
