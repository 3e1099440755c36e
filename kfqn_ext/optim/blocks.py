"""The curvature of one layer's block, in its state: made once, learned from two passes, applied at every step."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kfqn_ext.extensions import Gram, KroneckerFactors, Traces
from kfqn_ext.linalg import full_precision
from kfqn_ext.optim import splits
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.sides import Measured, Seen, State
from kfqn_ext.optim.sides.base import Kind
from kfqn_ext.optim.splits import Balance


def is_started(state: State | None) -> bool:
    """Whether a layer has curvature."""
    return state is not None and "num_locations" in state


def first_kinds(recipe: Recipe) -> set[Kind]:
    """What the first pass of a step that is due measures."""
    kinds: set[Kind] = {*recipe.input_side.first, *recipe.output_side.first}
    return kinds | ({"power"} if _measures_power(recipe) else set())


def second_kinds(recipe: Recipe) -> set[Kind]:
    """What the second pass measures."""
    return {*recipe.input_side.second, *recipe.output_side.second}


def start_kinds(recipe: Recipe) -> set[Kind]:
    """What makes a layer's initial curvature."""
    kinds: set[Kind] = {*recipe.input_side.starts_from, *recipe.output_side.starts_from}
    return kinds | ({"power"} if _measures_power(recipe) else set())


def _measures_power(recipe: Recipe) -> bool:
    """Whether the sizes of the factors must be measured: the split needs them, and no side keeps the factors."""
    return recipe.split is splits.trace and "factors" not in recipe.input_side.second


@full_precision()
def start(layer: Layer, state: State, recipe: Recipe, damping: float, measured: Measured) -> bool:
    """Make a layer's initial curvature; the one place that waits for the device, once per layer.

    Returns:
        False where what was measured is not finite: then nothing is made.
    """
    A = measured.A
    assert A is not None
    others = [] if measured.power is None else [measured.power.A, measured.power.G]
    others += [] if measured.factors is None else [measured.factors.Gamma]
    if not all(bool(torch.isfinite(value).all()) for value in [A, *others]):
        return False
    _make(layer, state, recipe, damping, measured)
    return True


def _make(layer: Layer, state: State, recipe: Recipe, damping: float, measured: Measured) -> None:
    A = measured.A
    assert A is not None and measured.num_locations is not None
    if measured.power is not None:
        state["power_A"], state["power_G"] = measured.power.A, measured.power.G
    elif measured.factors is not None:
        state["power_A"] = A.diagonal(dim1=-2, dim2=-1).mean(-1)
        state["power_G"] = measured.factors.Gamma.diagonal(dim1=-2, dim2=-1).mean(-1)
    state["num_locations"] = _on_host(measured.num_locations)
    like = A.new_zeros(layer.geometry.matrix_shape[:-1])
    damping_A, damping_G = dampings(layer, state, recipe, damping)
    recipe.input_side.start(state, A, damping_A)
    recipe.output_side.start(state, like, measured, damping_G)


@full_precision()
def start_empty(layer: Layer, state: State, recipe: Recipe, damping: float) -> None:
    """Fill a layer's state with tensors of the right names, shapes and dtypes, for a checkpoint to be read into.

    ``num_locations`` is 0, which no layer has: :func:`is_empty`.
    """
    weight, (*blocks, d_out, d_in) = layer.weight, layer.geometry.matrix_shape
    W = torch.zeros(
        layer.geometry.matrix_shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
    )
    A, Gamma, ones = W.new_zeros(*blocks, d_in, d_in), W.new_zeros(*blocks, d_out, d_out), W.new_ones(blocks)
    kinds = start_kinds(recipe)
    measured = Measured(
        gram=Gram(A, 1, 1) if "gram" in kinds else None,
        factors=KroneckerFactors(A, Gamma, 1, 1) if "factors" in kinds else None,
        power=Traces(ones, ones.clone(), 1, 1) if "power" in kinds else None,
    )
    state["momentum"] = W
    _make(layer, state, recipe, damping, measured)
    state["num_locations"] = _on_host(0.0)


def is_empty(state: State) -> bool:
    """Whether :func:`start_empty` made this state and nothing was read into it."""
    return "num_locations" in state and float(state["num_locations"]) == 0.0


def _on_host(number: float) -> Tensor:
    # Whatever torch.set_default_device and set_default_dtype say: it is read at every step.
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def kin(layer: Layer) -> Hashable:
    """What layers must have in common to :func:`learn` together: vectors that can stand beside each other."""
    blocks = layer.geometry.blocks
    return layer.weight.device, layer.weight.dtype, blocks and layer.geometry.matrix_shape


@full_precision()
def learn(
    layers: Sequence[Layer], states: Sequence[State], recipe: Recipe, damping: Sequence[float], seen: Seen
) -> None:
    """Update both sides of layers of one :func:`kin` from the two passes over a minibatch."""
    pairs = []
    for layer, state, value, first in zip(layers, states, damping, seen.first, strict=True):
        _follow_power(state, first.power, seen.finite)
        pairs.append(dampings(layer, state, recipe, value, first.num_locations))
    damping_A, damping_G = (torch.stack(values) for values in zip(*pairs, strict=True))
    recipe.input_side.learn(states, seen, damping_A)
    recipe.output_side.learn(states, seen, damping_G)


def _follow_power(state: State, power: Traces | None, finite: Tensor, decay: float = 0.9) -> None:
    """Move the averages of the factors' mean eigenvalues, where the split needs them."""
    if power is not None:
        for name, value in (("power_A", power.A), ("power_G", power.G)):
            state[name].lerp_(torch.where(torch.isfinite(value) & finite, value, state[name]), 1.0 - decay)


@full_precision()
def refresh(layer: Layer, state: State, recipe: Recipe, damping: float) -> None:
    """Recompute inverses that are not updated pair by pair."""
    for key, power in (("power_A", recipe.input_side.power(state)), ("power_G", recipe.output_side.power(state))):
        if power is not None:
            state[key] = power
    damping_A, damping_G = dampings(layer, state, recipe, damping)
    recipe.input_side.refresh(state, damping_A)
    recipe.output_side.refresh(state, damping_G)


def precondition(state: State, recipe: Recipe, M: Tensor) -> Tensor:
    """H_G M H_A: [*B, d_out, d_in]."""
    return recipe.output_side.precondition(state, recipe.input_side.precondition(state, M)).to(M.dtype)


def dampings(
    layer: Layer, state: State, recipe: Recipe, damping: float, num_locations: float | None = None
) -> tuple[Tensor, Tensor]:
    """λ_A and λ_G as tensors [*B]; |T| of this pass where given, else that of the first."""
    T = float(state["num_locations"]) if num_locations is None else num_locations
    balance = Balance(T, state.get("power_A"), state.get("power_G"))
    like = layer.weight
    dtype = torch.promote_types(like.dtype, torch.float32)
    pair = []
    for value in recipe.split(damping, balance):
        if isinstance(value, Tensor):
            pair.append(value.to(dtype))
        else:
            pair.append(torch.full(layer.geometry.blocks, value, dtype=dtype, device=like.device))
    return pair[0], pair[1]
