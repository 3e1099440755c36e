"""Checks of hyperparameters, one message each."""

from typing import Any

import torch
from torch import Tensor

from kfqn_ext.optim.groups.hyperparameters import UPDATE_FREQS

# Not float16: the inverses of a large loss's curvature leave its range.
_DIRECTION_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check_group(group: dict[str, Any]) -> None:
    """Check the hyperparameters of a parameter group.

    Raises:
        ValueError: With the name, the value and the range of the first one that is out of range.
    """
    for key in ("momentum", "lr", "damping", "weight_decay"):
        _require(not callable(group[key]), key, group[key], "a number; it can't be a function of the step")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    _require(lr >= 0, "learning rate lr", lr, "at least 0")
    _require(group["damping"] > 0, "damping", group["damping"], "positive: A + λ_A I must be invertible")
    _require(0 <= group["momentum"] < 1, "momentum", group["momentum"], "in [0, 1)")
    _require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "at least 0")
    dtype = group["direction_dtype"]
    _require(dtype in (None, *_DIRECTION_DTYPES), "direction_dtype", dtype, f"None or one of {_DIRECTION_DTYPES}")
    for key in (*UPDATE_FREQS, "inverse_update_freq"):
        value = group.get(key, 1)
        _require(isinstance(value, int) and value >= 1, key, value, "an integer of at least 1")


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"Invalid {name}: {value}. It must be {rule}.")
