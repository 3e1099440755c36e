"""The curvature of one layer's block, in its state: made once, learned from two passes, applied at every step."""

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from kfqn_ext.extensions import InputMoments, InputTrace, InputTraces, KFACFactors
from kfqn_ext.linalg import full_precision
from kfqn_ext.linalg.splits import Balance
from kfqn_ext.optim.groups.plan import Block, Layer, working_dtype
from kfqn_ext.optim.inverses import Measured, Seen, State
from kfqn_ext.optim.numbers import as_real
from kfqn_ext.optim.preconditioner.guard import keep_definite
from kfqn_ext.optim.recipe import Recipe

_TRACES = ("trace_A", "trace_G")


def is_started(block: Block) -> bool:
    """Whether a layer has curvature."""
    return "num_locations" in block.state


def is_elsewhere(state: State) -> bool:
    """Whether a layer has curvature that another process keeps: here is |T| alone, as a mark."""
    return "num_locations" in state and "momentum" not in state


@full_precision()
def start(block: Block, recipe: Recipe, measured: Measured) -> bool:
    """Make a layer's initial curvature; the one place that waits for the device, once per layer.

    Returns:
        False where what was measured is not finite: then nothing is made.
    """
    if not _is_finite(measured, recipe):
        return False
    _make(block, recipe, measured)
    return True


def start_elsewhere(block: Block, recipe: Recipe, measured: Measured) -> bool:
    """Note that another process makes a layer's initial curvature from the same measurements, and keeps it.

    Returns:
        False where what was measured is not finite, as :func:`start` does there.
    """
    if not _is_finite(measured, recipe):
        return False
    assert measured.num_locations is not None
    leave_to_another(block.state, measured.num_locations)
    return True


def start_from_another(block: Block, recipe: Recipe, measured: Measured, made: State) -> bool:
    """Make room for the initial curvature that another process makes of the same measurements, and sends.

    Args:
        block: The layer.
        recipe: The recipe.
        measured: What it is made of.
        made: It, as tensors without numbers.

    Returns:
        False where what was measured is not finite, as :func:`start` does there.
    """
    if not _is_finite(measured, recipe):
        return False
    assert measured.num_locations is not None
    device = momentum(block.layer, block.state).device
    block.state.update({name: torch.empty_like(t, device=device) for name, t in made.items()})
    block.state["num_locations"] = _on_host(measured.num_locations)
    return True


def made_at_start(template: State, recipe: Recipe) -> State:
    """What of a layer's state :func:`start` makes of measurements; |T| is known to all, and M zero."""
    by_length: State = {}
    recipe.length.start(by_length, template["momentum"])
    return {name: t for name, t in template.items() if name not in {"momentum", "num_locations", *by_length}}


def leave_to_another(state: State, num_locations: float) -> None:
    """Keep the mark of a layer with curvature, and nothing else."""
    state.clear()
    state["num_locations"] = _on_host(num_locations)


def _is_finite(measured: Measured, recipe: Recipe) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in _tensors(measured, recipe))


def _tensors(measured: Measured, recipe: Recipe) -> list[Tensor]:
    """Everything that the initial curvature is made from."""
    quantities = [q for q in (measured.get(kind) for kind in recipe.starts_from) if q is not None]
    inputs = [q.a_bar for q in quantities if isinstance(q, InputMoments)]  # whatever their gradients are
    others = [q for q in quantities if not isinstance(q, InputMoments)]
    return inputs + [value for q in others for f in fields(q) if isinstance(value := getattr(q, f.name), Tensor)]


def _make(block: Block, recipe: Recipe, measured: Measured) -> None:
    assert measured.num_locations is not None
    state = block.state
    traces, factors = measured.get(InputTraces), measured.get(KFACFactors)
    if traces is None and factors is not None:
        traces = factors.traces()
    if traces is not None:
        state.update(_by_key(traces))
    state["num_locations"] = _on_host(measured.num_locations)
    M = momentum(block.layer, state)
    (*blocks, d_out, d_in) = M.shape
    damping_A, damping_G = dampings(block, recipe)
    recipe.input_inverse.start(state, M.new_zeros(*blocks, d_in), measured, damping_A)
    recipe.output_inverse.start(state, M.new_zeros(*blocks, d_out), measured, damping_G)


@full_precision()
def start_empty(block: Block, recipe: Recipe) -> None:
    """Fill a layer's state with tensors of the right names, shapes and dtypes, for a checkpoint to be read into.

    ``num_locations`` is 0, which no layer has: :func:`is_empty`.

    Raises:
        NotImplementedError: If an extension that the curvature starts from has no ``blank``.
    """
    W, geometry = momentum(block.layer, block.state), block.layer.geometry
    recipe = recipe.at(geometry.d_in)
    _make(block, recipe, Measured({kind: kind.blank(geometry, W) for kind in recipe.starts_from}))
    recipe.length.start(block.state, W)
    block.state["num_locations"] = _on_host(0.0)


def without_numbers(layer: Layer) -> Block:
    """A layer as :func:`start_empty` can fill it on the device "meta": names, shapes and dtypes cost nothing there."""
    return Block(
        replace(layer, weight=torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")),
        {"damping": 1.0},
        {},
    )


def empty_other(p: Tensor, recipe: Recipe) -> State:
    """The same for a parameter without a block."""
    state = {"momentum": torch.zeros_like(p, dtype=working_dtype(p))}
    recipe.others.start(state, as_real(state["momentum"]))
    return state


def is_empty(state: State) -> bool:
    """Whether :func:`start_empty` made this state and nothing was read into it."""
    return "num_locations" in state and float(state["num_locations"]) == 0.0


def momentum(layer: Layer, state: State) -> Tensor:
    """M of a layer's W, [*B, d_out, d_in], in its state; zero at first."""
    if "momentum" not in state:
        weight = layer.weight
        state["momentum"] = torch.zeros(layer.geometry.matrix_shape, dtype=working_dtype(weight), device=weight.device)
    return state["momentum"]


def _on_host(number: float) -> Tensor:
    # Whatever torch.set_default_device and set_default_dtype say: it is read at every step.
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def kin(layer: Layer) -> Hashable:
    """What layers must have in common to :func:`learn` together: vectors that can stand beside each other."""
    blocks = layer.geometry.blocks
    return layer.weight.device, layer.weight.dtype, blocks and layer.geometry.matrix_shape


@full_precision()
def learn(blocks: Sequence[Block], recipe: Recipe, seen: Seen) -> None:
    """Update both inverses of layers of one :func:`kin` from the two passes over a minibatch."""
    pairs = []
    for block, first in zip(blocks, seen.first, strict=True):
        _follow_traces(block.state, first.get(InputTraces), seen.finite)
        pairs.append(dampings(block, recipe, first.num_locations))
    damping_A, damping_G = (torch.stack(values) for values in zip(*pairs, strict=True))
    keep_definite(blocks, recipe.learned, seen.step)
    states = [block.state for block in blocks]
    recipe.input_inverse.learn(states, seen, damping_A)
    recipe.output_inverse.learn(states, seen, damping_G)


def _follow_traces(state: State, traces: InputTrace | None, finite: Tensor, decay: float = 0.9) -> None:
    """Move the averages of the factors' mean eigenvalues, where the split needs them."""
    for key, value in ({} if traces is None else _by_key(traces)).items():
        old = state[key]
        moved = torch.where(old > 0, torch.lerp(value, old, decay), value)  # zero: no mean of anything yet
        old.copy_(torch.where(torch.isfinite(value) & finite, moved, old))


def _by_key(traces: InputTrace) -> State:
    """What was measured of A's and Γ's mean eigenvalues, as a layer's state calls them."""
    return {key: getattr(traces, factor) for key, factor in zip(_TRACES, "AG", strict=True) if hasattr(traces, factor)}


@full_precision()
def update_traces(block: Block, recipe: Recipe) -> None:
    """Follow the factors that are kept: the dampings of inverses that are recomputed depend on their traces."""
    recipe = recipe.at(block.layer.geometry.d_in)
    for key, rule in zip(_TRACES, (recipe.input_inverse, recipe.output_inverse), strict=True):
        trace = rule.trace(block.state)
        if trace is not None:
            block.state[key] = trace


@full_precision()
def update_inverses(block: Block, recipe: Recipe) -> None:
    """Recompute inverses that are not updated pair by pair."""
    recipe = recipe.at(block.layer.geometry.d_in)
    for rule, damping in zip((recipe.input_inverse, recipe.output_inverse), dampings(block, recipe), strict=True):
        rule.update_inverse(block.state, damping)


def leave_inverses_to_another(block: Block, recipe: Recipe) -> None:
    """Make room for those that another process recomputes, and sends."""
    for name in recipe.recomputed:
        block.state[name] = torch.empty_like(block.state[name], memory_format=torch.contiguous_format)


def precondition(state: State, recipe: Recipe, M: Tensor) -> Tensor:
    """H_G M H_A, ``eq_18`` and ``line_5`` of ``algo_1``: [*B, d_out, d_in].

    Contiguous, so that it has views shaped like the parameters.
    """
    P = recipe.output_inverse.precondition(state, recipe.input_inverse.precondition(state, M))
    return P.to(M.dtype).contiguous()


def dampings(block: Block, recipe: Recipe, num_locations: float | None = None) -> tuple[Tensor, Tensor]:
    """λ_A and λ_G as tensors [*B]; |T| of this pass where given, else that of the first."""
    like = block.layer.weight
    pair = []
    for value in recipe.split(block.group["damping"], balance(block, recipe, num_locations)):
        if isinstance(value, Tensor):
            pair.append(value.to(working_dtype(like)))
        else:
            shape = block.layer.geometry.blocks
            pair.append(torch.full(shape, value, dtype=working_dtype(like), device=like.device))
    return pair[0], pair[1]


def balance(block: Block, recipe: Recipe, num_locations: float | None = None) -> Balance:
    """What is known of the sizes of a layer's factors."""
    T = float(block.state["num_locations"]) if num_locations is None else num_locations
    trace_A, trace_G = (block.state.get(key) for key in _TRACES)
    if recipe.output_inverse.in_own_units and trace_A is not None:
        trace_G = torch.ones_like(trace_A)
    return Balance(T, trace_A, trace_G)
