"""State that was saved: does it fit this model and this optimizer, and in which dtype and where is it kept?"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from kfqn_ext.optim.groups.plan import Block, Plan, working_dtype
from kfqn_ext.optim.inverses import State
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.recipe import Recipe

# Of the state: to be raised when the names or the meaning of its tensors change.
_LAYOUT = 2
# What layout 1 called the same things.
_RENAMED_RULES = {
    "DenseSecant": "SecantBFGS",
    "LimitedSecant": "SecantLBFGS",
    "LimitedHessianAction": "HessianActionLBFGS",
}
_RENAMED_KEYS = {"power_A": "trace_A", "power_G": "trace_G"}


def layout(recipe: Recipe) -> str:
    """A mark that is saved with the state: version, input inverse, output inverse."""
    return f"{_LAYOUT} {type(recipe.input_inverse).__name__} {type(recipe.output_inverse).__name__}"


def migrated(state_dict: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary of an earlier version in the words of this one; others as they are. Nothing is changed."""
    groups = [_migrated_group(group, defaults) for group in state_dict["param_groups"]]
    state = {
        key: {_RENAMED_KEYS.get(name, name): value for name, value in saved.items()}
        for key, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def _migrated_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    version, *rules = str(group.get("layout", "0, without a mark")).split(" ")
    if version != "1":
        return dict(group)
    new = {**group, "layout": " ".join([str(_LAYOUT), *(_RENAMED_RULES.get(rule, rule) for rule in rules)])}
    if "stats_update_freq" in defaults:  # KFAC's T₁, which was saved under the name of K-BFGS's T
        _rename(new, "curvature_update_freq", "stats_update_freq")
        if "scheduled" in new:
            new["scheduled"] = _rename(dict(new["scheduled"]), "curvature_update_freq", "stats_update_freq")
    return new


def _rename(mapping: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    if old in mapping:
        mapping[new] = mapping.pop(old)
    return mapping


def check_loadable(
    state_dict: Mapping[str, Any], parameters: Iterable[Tensor], plan: Plan, recipe: Recipe, name: str
) -> None:
    """Raise a ValueError where a state is of another kind of optimizer, another version's, or another model's."""
    found = {group.get("layout", "0, without a mark") for group in state_dict["param_groups"]}
    if found - {layout(recipe)}:
        raise ValueError(
            f"This state has the layout {found.pop()!r}, and {name} reads {layout(recipe)!r} (version, input inverse, "
            "output inverse): it was saved by another version of the package or by another optimizer. Load it with "
            "that one; or load the model alone and start with fresh curvature (warm_start)."
        )
    for saved_id, p in zip(saved_ids(state_dict), parameters, strict=False):  # torch compares the numbers
        layer = plan.layers.get(p)
        whose = f"parameter {saved_id!r}, here of shape {list(p.shape)}"
        whose = whose if layer is None else f"layer {layer.name}, {whose}"
        _check_shapes(state_dict["state"].get(saved_id, {}), _expected_state(p, plan, recipe), whose)


def saved_ids(state_dict: Mapping[str, Any]) -> list[Any]:
    """The keys of a state dictionary's parameters, in their order."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def _expected_state(p: Tensor, plan: Plan, recipe: Recipe) -> State:
    """What the state of a parameter can hold, as tensors without numbers, on the device "meta"."""
    layer, p = plan.layers.get(p), p.detach().to("meta")
    if layer is None:
        return blocks.empty_other(p, recipe)
    block = Block(replace(layer, weight=p), {"damping": 1.0}, {})
    with suppress(NotImplementedError):  # of a quantity of somebody's own, whose shapes are not known: the rest remains
        blocks.start_empty(block, recipe)
    return block.state


def _check_shapes(saved: Mapping[str, Any], expected: State, name: str) -> None:
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
    dtype = working_dtype(p) if value.is_floating_point() else value.dtype
    value = value.to(p.device, dtype, copy=True)
    # An update keeps a symmetric H symmetric to the last bit; those of earlier versions were up to rounding.
    return (value + value.mT).mul_(0.5) if key in ("H_A", "H_G") else value


def is_fitted(state: State, p: Tensor) -> bool:
    """Whether a parameter's state is as :func:`fitted` makes it, told by the momentum."""
    M = state.get("momentum")
    return M is None or (M.dtype == working_dtype(p) and M.device == p.device)
