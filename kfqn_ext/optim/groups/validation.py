"""Checks of hyperparameters, one message each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_on_host
from kfqn_ext.errors import listed
from kfqn_ext.optim.groups.hyperparameters import UPDATE_FREQS
from kfqn_ext.optim.numbers import integer, is_count, number

# Not float16: the inverses of a large loss's curvature leave its range.
_DIRECTION_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_NUMBERS = ("momentum", "damping", "weight_decay")
_COUNTS = (*UPDATE_FREQS, "inverse_update_freq")
_OF_THE_STEP = ("lr", "damping", *_COUNTS, "momentum", "direction_dtype")


def check_arguments(model: Any, params: Any, name: str) -> None:
    """Check what was given in the places of the model and of its parameters.

    Raises:
        TypeError: If parameters or a learning rate are in these places.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name}: the model comes first, {name}(model), or {name}(model, params) for some of its parameters, and "
            f"not {type(model).__name__}. {name} measures the model's layers, so that parameters alone don't do, and "
            "neither do wrappers that build an optimizer of these, as ZeroRedundancyOptimizer does. State is divided "
            f"among processes by {name}(model, shard_state=True)."
        )
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{name}: after the model come parameters, not {type(params).__name__}. {name}(model) takes all of the "
            f"model's, and {name}(model, module.parameters()) those of a module in it."
        )
    holds_one = isinstance(params, Tensor) and not isinstance(params, nn.Parameter) and params.numel() == 1
    if isinstance(number(params), int | float) or holds_one or callable(params):
        shown = "..." if callable(params) else number(params)
        raise TypeError(
            f"{name}: after the model come its parameters or groups of them, not {shown}. `lr` is a keyword: "
            f"{name}(model, lr={shown})."
        )


def settle(group: dict[str, Any]) -> None:
    """Write a group's numbers as numbers of Python's, whoever has set them.

    A rate that is a tensor stays one, and so does what is not the optimizer's own.
    """
    for key, value in group.items():
        if key in _COUNTS:
            group[key] = integer(value)
        elif key in _NUMBERS or not isinstance(value, Tensor | list):
            group[key] = number(value)


def check_group(group: dict[str, Any]) -> None:
    """Check the hyperparameters of a parameter group, and :func:`settle` them.

    Raises:
        ValueError: With the name, the value and the range of the first one that is out of range.
    """
    settle(group)
    for key in (*_NUMBERS, "lr"):
        value = group[key]
        is_number = isinstance(value, int | float) or (key == "lr" and isinstance(value, Tensor))
        rule = "a number; it can't be a function of the step" if callable(value) else "a number"
        _require(is_number, key, value, rule)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not _is_elsewhere(lr):  # a device would have to be waited for
        _require(lr >= 0, "learning rate lr", lr, "at least 0")
    _require(group["damping"] > 0, "damping", group["damping"], "positive: A + λ_A I must be invertible")
    _require(0 <= group["momentum"] < 1, "momentum", group["momentum"], "in [0, 1)")
    _require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "at least 0")
    dtype = group["direction_dtype"]
    _require(dtype in (None, *_DIRECTION_DTYPES), "direction_dtype", dtype, f"None or one of {_DIRECTION_DTYPES}")
    for key in _COUNTS:
        _require(is_count(group.get(key, 1)), key, group.get(key), "an integer of at least 1")


def check_split(groups: Sequence[dict[str, Any]], split: Mapping[tuple[int, int], tuple[str, ...]]) -> None:
    """Check that groups which share layers, one the weights and another the biases, have one step for both.

    Args:
        groups: All groups.
        split: Names of such layers by the indices of their two groups.

    Raises:
        ValueError: With the layers, and the first hyperparameter in which the groups differ.
    """
    for (i, j), layers in split.items():
        for key in _OF_THE_STEP:
            one, other = groups[i].get(key), groups[j].get(key)
            if not _alike(one, other):
                raise ValueError(
                    f"Weight and bias of {listed(layers)} are one matrix W = [weight, bias] with one step, but "
                    f"their groups {i} and {j} have the {key} {one} and {other}. Only weight_decay may differ between "
                    f"the two. Give both groups one {key}, or put weight and bias into one group."
                )


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as that is known without waiting for a device."""
    return one is other or _is_elsewhere(one) or _is_elsewhere(other) or bool(one == other)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_on_host(value)


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"Invalid {name}: {value}. It must be {rule}.")
