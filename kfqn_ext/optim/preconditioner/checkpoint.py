"""State that was saved: does it fit this model and this optimizer, and in which dtype and where is it kept?"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kfqn_ext._torch import is_divided, own_rows, rows_of, uncompiled_name
from kfqn_ext.errors import listed
from kfqn_ext.optim.groups.plan import Plan, working_dtype
from kfqn_ext.optim.inverses import State
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner.owners import Owners
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
    """A mark that is saved with the state: version, input inverse, output inverse, and what wide layers have."""
    wide = "" if recipe.wide is None else f" {type(recipe.wide.rule).__name__} above {recipe.wide.above}"
    return f"{_LAYOUT} {type(recipe.input_inverse).__name__} {type(recipe.output_inverse).__name__}{wide}"


def migrated(state_dict: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary of an earlier version in the words of this one; others as they are. Nothing is changed.

    Raises:
        ValueError: If it is none.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"This is no state of an optimizer, which has 'state' and 'param_groups': it has {listed([*state_dict])}. "
            "Of a checkpoint, give the part that optimizer.state_dict() returned."
        )
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


def in_order(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]
) -> dict[str, Any]:
    """A state dictionary with its groups and parameters in the order of an optimizer's, where it has their names.

    Args:
        state_dict: What was saved; nothing in it is changed.
        groups: The optimizer's.
        names: Those of the model's parameters, for groups without ``param_names``.

    Raises:
        ValueError: If its parameters have other names than the optimizer's, or are grouped otherwise.
    """
    saved = state_dict["param_groups"]
    saved_names = [[uncompiled_name(name) for name in group.get("param_names", [])] for group in saved]
    if any(len(found) != len(group["params"]) for found, group in zip(saved_names, saved, strict=True)):
        return dict(state_dict)  # without names, or somebody has changed one of the two
    own_names = [group.get("param_names", [names[p] for p in group["params"]]) for group in groups]
    given = all("param_names" in group for group in groups)
    order = _order(saved_names, [[uncompiled_name(name) for name in own] for own in own_names], given)
    if order is None:
        return dict(state_dict)
    ordered = []
    for i, own in zip(order, own_names, strict=True):
        ids = dict(zip(saved_names[i], saved[i]["params"], strict=True))
        ordered.append({**saved[i], "params": [ids[uncompiled_name(name)] for name in own], "param_names": list(own)})
    return {**state_dict, "param_groups": ordered}


def _order(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]], given: bool) -> list[int] | None:
    """Which saved group is which of the own ones, by the names in them; None where these do not tell.

    Args:
        saved: The names that were saved with each group.
        own: The optimizer's.
        given: Whether somebody has given these to it. Else others say nothing.
    """
    before, now = ([name for group in groups for name in group] for groups in (saved, own))
    if len({*before}) < len(before) or len({*now}) < len(now):
        return None
    if {*before} != {*now}:
        if not given:
            return None
        lacking, more = (listed(sorted(names)) for names in ({*now} - {*before}, {*before} - {*now}))
        raise ValueError(
            f"This state is not that of these parameter groups: of their parameters it lacks {lacking}, and it has "
            f"{more} beside them. Build model and optimizer as they were built when the state was saved. Where names "
            "alone have changed, rename them in group['param_names'] of the state's param_groups, or delete these "
            "lists to load by order."
        )
    groups = {frozenset(group): i for i, group in enumerate(saved)}
    found = [groups.get(frozenset(group)) for group in own]
    for group, i in zip(own, found, strict=True):
        if i is None:
            raise ValueError(
                f"This state has its parameters in other groups: {listed(sorted(group))} make one here. Build the "
                "optimizer with the groups that it had when the state was saved, or delete 'param_names' of the "
                "state's param_groups to load by order."
            )
    return [i for i in found if i is not None]


def check_layout(state_dict: Mapping[str, Any], recipe: Recipe, name: str) -> None:
    """Raise a ValueError where a state is of another kind of optimizer, or another version's."""
    found = {group.get("layout", "0, without a mark") for group in state_dict["param_groups"]}
    other = found - {layout(recipe)}
    if other:
        raise ValueError(
            f"This state has the layout {min(other)!r}, and {name} reads {layout(recipe)!r} (version, input inverse, "
            "output inverse): it was saved by another version of the package or by another optimizer. Load it with "
            "that one; or load the model alone and start with fresh curvature (warm_start)."
        )


def check_shapes(state_dict: Mapping[str, Any], parameters: Iterable[Tensor], plan: Plan, recipe: Recipe) -> None:
    """Raise a ValueError where a state is another model's, as the shapes of its tensors tell."""
    for saved_id, p in zip(saved_ids(state_dict), parameters, strict=False):  # torch compares the numbers
        layer = plan.layers.get(p)
        whose = f"parameter {saved_id!r}, here of shape {list(p.shape)}"
        whose = whose if layer is None else f"layer {layer.name}, {whose}"
        _check_shapes(state_dict["state"].get(saved_id, {}), _expected_state(p, plan, recipe), whose)


def part_of(
    state_dict: Mapping[str, Any], parameters: Iterable[Tensor], plan: Plan, owners: Owners, name: str
) -> dict[str, Any]:
    """What of a state dictionary this process keeps: of layers whose curvature others keep, a mark.

    Raises:
        ValueError: If it lacks what this process has to keep: it is another process's part.
    """
    state, lacking = dict(state_dict["state"]), []
    for saved_id, p in zip(saved_ids(state_dict), parameters, strict=False):
        saved, layer = state.get(saved_id, {}), plan.layers.get(p)
        if layer is None or "num_locations" not in saved:
            continue
        if not owners.owns(layer):
            state[saved_id] = {"num_locations": saved["num_locations"]}
        elif blocks.is_elsewhere(saved) and not blocks.is_empty(saved):
            lacking.append(layer.name)
    if lacking:
        raise ValueError(
            f"This state is one process's part of a state that was sharded: of {listed(lacking)} it has no curvature, "
            f"and {name} keeps theirs here. Save all parts with torch.distributed.checkpoint (DCP), which joins and "
            "divides them for any number of processes; or save what gather_state() returns on one process."
        )
    return {**state_dict, "state": state}


def owned_part(
    state_dict: Mapping[str, Any], parameters: Iterable[Tensor], plan: Plan, owners: Owners
) -> dict[Any, State]:
    """The state of all parameters of layers that this process owns, by the keys of a state dictionary, on the CPU."""
    owned = {weight for weight, layer in plan.layers.items() if owners.owns(layer)}
    return {
        saved_id: {key: value.cpu() for key, value in state_dict["state"][saved_id].items()}
        for saved_id, p in zip(saved_ids(state_dict), parameters, strict=True)
        if plan.covered.get(p, p) in owned and saved_id in state_dict["state"]
    }


def with_whole_tensors(state: Mapping[Any, State], owners: Owners, rank: int) -> dict[Any, State]:
    """State with what processes have rows of, whole for one of them; a collective where they do.

    Args:
        state: All state, by the keys of a state dictionary.
        owners: What moves rows.
        rank: Who is to have it. Others get it without these tensors.
    """
    found = {key: dict(values) for key, values in state.items()}
    divided = [(key, name) for key, values in state.items() for name, value in values.items() if is_divided(value)]
    if owners.rows is None or not divided:
        return found
    tensors = [state[key][name] for key, name in divided]
    whole = owners.rows.gathered([rows_of(t) for t in tensors], [t.shape for t in tensors], [rank] * len(tensors))
    for (key, name), value in zip(divided, whole, strict=True):
        del found[key][name]
        if value is not None:
            found[key][name] = value
    return found


def divided(state: State, p: Tensor, recipe: Recipe) -> State:
    """The state of a parameter without a block, divided among processes as the parameter is."""
    like = blocks.empty_other(p, recipe) if is_divided(p) else {}
    return {key: own_rows(value, like.get(key)) for key, value in state.items()}


def saved_ids(state_dict: Mapping[str, Any]) -> list[Any]:
    """The keys of a state dictionary's parameters, in their order."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def _expected_state(p: Tensor, plan: Plan, recipe: Recipe) -> State:
    """What the state of a parameter can hold, as tensors without numbers, on the device "meta"."""
    if plan.role(p) is None:
        return {}
    layer = plan.layers.get(p)
    if layer is None:
        return blocks.empty_other(torch.empty_like(rows_of(p.detach()), device="meta").new_empty(p.shape), recipe)
    block = blocks.without_numbers(layer)
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
    dtype = value.dtype
    if value.is_complex():
        dtype = working_dtype(p)
    elif value.is_floating_point():  # also of a complex parameter
        dtype = working_dtype(p).to_real()
    value = value.to(p.device, dtype, copy=True)
    # An update keeps a symmetric H symmetric to the last bit; those of earlier versions were up to rounding.
    return (value + value.mT).mul_(0.5) if key in ("H_A", "H_G") else value


def is_fitted(state: State, p: Tensor) -> bool:
    """Whether a parameter's state is as :func:`fitted` makes it, told by one of its tensors.

    That is the momentum, but for a bias that moves alone: its momentum is a column of its layer's.
    """
    others = (t for key, t in state.items() if key != "num_locations" and t.dtype.is_floating_point)
    found = state["momentum"] if "momentum" in state else next(others, None)
    return found is None or (found.dtype.to_real() == working_dtype(p).to_real() and found.device == p.device)
