"""State that was saved: does it fit this model and this optimizer, and in which dtype and where is it kept?"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.optim import blocks, descent
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.sides import State


def expected_state(p: Tensor, layer: Layer | None, recipe: Recipe) -> State:
    """What the state of a parameter can hold, as tensors without numbers, on the device "meta"."""
    p = p.detach().to("meta")
    if layer is None:
        return {"momentum": torch.empty_like(p, dtype=descent.working_dtype(p))}
    state: State = {}
    blocks.start_empty(replace(layer, weight=p), state, recipe, damping=1.0)
    return state


def check_shapes(saved: Mapping[str, Any], expected: State, name: str) -> None:
    """Raise a ValueError where a saved tensor has not the shape that is expected of it."""
    for key, want in expected.items():
        found = saved.get(key)
        if isinstance(found, Tensor) and found.shape != want.shape:
            raise ValueError(
                f"The state has a {key} of shape {list(found.shape)} where this model needs {list(want.shape)} "
                f"({name}): it is another model's, its parameters come in another order, or the optimizer had another "
                "history_size. Build model and optimizer as they were built when the state was saved."
            )


def fitted(saved: Mapping[str, Any], p: Tensor) -> State:
    """Copy a parameter's state to where the parameter is, in the dtype that its state has."""
    return {key: _fitted(key, value, p) for key, value in saved.items() if isinstance(value, Tensor)}


def _fitted(key: str, value: Tensor, p: Tensor) -> Tensor:
    if key == "num_locations":  # a number of the host
        return value.to("cpu", copy=True)
    dtype = descent.working_dtype(p) if value.is_floating_point() else value.dtype
    return value.to(p.device, dtype, copy=True)


def is_fitted(state: State, p: Tensor) -> bool:
    """Whether a parameter's state is as :func:`fitted` makes it, told by the momentum."""
    M = state.get("momentum")
    return M is None or (M.dtype == descent.working_dtype(p) and M.device == p.device)
