"""Momentum and step of all parameters, in place, without waiting for the device and in few operations.

A layer's W = [weight, bias] moves as one matrix; which entries of a matrix are the weight's, its geometry knows. A
complex parameter moves as its real and imaginary parts.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfqn_ext._torch import rows_of
from kfqn_ext.linalg import flush_
from kfqn_ext.optim.gate import Gate, Rate
from kfqn_ext.optim.groups.plan import Layer, Plan, working_dtype
from kfqn_ext.optim.inverses import State
from kfqn_ext.optim.lengths import Step, StepLength
from kfqn_ext.optim.moves import Move, apply, from_owners, shortening, squared_length
from kfqn_ext.optim.numbers import as_real
from kfqn_ext.optim.others import Other, Others
from kfqn_ext.optim.preconditioner.block import is_elsewhere, is_started, momentum
from kfqn_ext.optim.preconditioner.owners import Owners
from kfqn_ext.optim.recipe import Recipe

T = TypeVar("T")
Group = dict[str, Any]
Direction = Callable[[Layer, Group, Tensor], Tensor | None]
"""(layer, its group, M) ↦ P = H_G M H_A, or None for a layer without curvature, which moves as others do."""
GradNorms = Mapping[Tensor, Tensor]
Gradients = Mapping[Tensor, Tensor]
"""Of each parameter that has one: whole where its layer moves here, else what is here of it."""
Shrinks = Mapping[Tensor, Rate]
# A momentum shrinks to 0.005 of itself in so many steps at β = 0.9: far from subnormal, at no cost worth a mention.
_FLUSH_EVERY = 50


def descend(
    groups: Sequence[Group],
    state: Mapping[Tensor, State],
    plan: Plan,
    recipe: Recipe,
    direction: Direction,
    grad_norms: GradNorms,
    finite: Tensor,
    limit: Tensor | None,
    owners: Owners,
) -> None:
    """Move all parameters that have a gradient: M ← βM + g, then θ ← θ - α (c p + γθ).

    The second is ``line_14`` of ``algo_8`` with the weight decay of ``sec_5``; there c is 1.

    Args:
        groups: Parameter groups.
        state: The optimizer's; momenta are made in it where there are none.
        plan: Which parameters form layers.
        recipe: The row of the table: its cells ``length``, which gives c, and ``others``.
        direction: p of a layer.
        grad_norms: Frobenius norm of each parameter's gradient, [], where it has one.
        finite: Whether the batch is, bool []; nothing changes where it is not.
        limit: Bound on the squared length of the whole step in the preconditioned norm, []; None for none.
        owners: Who finds the moves of layers with curvature.
    """
    gate, shrinks = Gate(finite), _shrinks(groups)
    shared = _shared(groups, state, plan, owners) if owners.several else {}
    grads, moving = _gradients(groups, plan, owners), _moving_here(groups, state, plan, owners)
    for group in groups:
        _forget(_idle_momenta(group, moving), gate)
        _accumulate(_momenta(group, state, plan, moving, grads), group, gate)
    ready: list[_Ready] = []
    moves: list[Move] = []
    for group in groups:
        layers, others = _apart(group, state, plan, moving, recipe.others, direction, grad_norms, grads)
        ready += layers
        moves += _moves_of_others(others, group, recipe.others, shrinks, gate)
    moves += _moves_of_layers(ready, recipe.length, shrinks, gate)
    if limit is not None:
        shorten = shortening(squared_length(moves, shared, owners), limit)
        moves = [replace(move, rate=move.rate * shorten) for move in moves]
    apply(from_owners(moves, shared, owners, shrinks, gate), gate)


# ------------------------------------------------------------------ which momentum is whose


def _gradients(groups: Sequence[Group], plan: Plan, owners: Owners) -> Gradients:
    found = {p: p.grad for group in groups for p in group["params"] if p.grad is not None}
    return owners.gradients(found, [plan.layers[p] for group in groups for p in group["params"] if p in plan.layers])


@dataclass(frozen=True)
class _Moving:
    """A layer that has a gradient, and whose momentum is here.

    Attributes:
        layer: The layer.
        M: Its momentum, [*B, d_out, d_in].
        parts: Its parameters that have a gradient, each with its part of M, a view.
        idle: Parts of M whose parameter has none.
    """

    layer: Layer
    M: Tensor
    parts: Sequence[tuple[Tensor, Tensor]]
    idle: Sequence[Tensor]


def _moving_here(
    groups: Sequence[Group], state: Mapping[Tensor, State], plan: Plan, owners: Owners
) -> dict[Tensor, _Moving]:
    """Such layers, by their weights."""
    weights = [p for group in groups for p in group["params"] if p in plan.layers]
    return {p: _moving(plan.layers[p], state[p]) for p in weights if _moves_here(plan.layers[p], state, owners)}


def _moving(layer: Layer, state: State) -> _Moving:
    M = momentum(layer, state)
    parts = _parts(layer, M)
    idle = [part for p, part in parts if p.grad is None]
    return _Moving(layer, M, [(p, part) for p, part in parts if p.grad is not None] if idle else parts, idle)


@dataclass(frozen=True)
class _Momenta:
    """What of a group has a gradient: whole momenta, and each gradient after the part of a momentum that it is of."""

    whole: list[Tensor]
    parts: list[tuple[Tensor, Tensor]]


def _momenta(
    group: Group, state: Mapping[Tensor, State], plan: Plan, moving: Mapping[Tensor, _Moving], grads: Gradients
) -> _Momenta:
    """Those of the layers that move here, and of parameters that have no block."""
    found = _Momenta([], [])
    for p in group["params"]:
        if p in moving:
            found.whole.append(moving[p].M)
            found.parts.extend((part, grads[q]) for q, part in moving[p].parts)
        elif p not in plan.layers and p not in plan.covered and p in grads:
            M = as_real(rows_of(_momentum_of(p, state[p])))
            found.whole.append(M)
            found.parts.append((M, as_real(grads[p])))
    return found


def _idle_momenta(group: Group, moving: Mapping[Tensor, _Moving]) -> Iterator[Tensor]:
    """Parts of a group's momenta whose parameter has no gradient, though its layer has one."""
    for p in group["params"]:
        if p in moving:
            yield from moving[p].idle


def _momentum_of(p: Tensor, state: State) -> Tensor:
    """The momentum of a parameter without a Kronecker block, in its state."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(p, dtype=working_dtype(p))
    return state["momentum"]


def _moves_here(layer: Layer, state: Mapping[Tensor, State], owners: Owners) -> bool:
    """Whether a layer has a gradient, and this process its momentum."""
    here = owners.owns(layer) if owners.rows is not None else not is_elsewhere(state.get(layer.weight, {}))
    return bool(_with_gradient(layer)) and here


def _shared(groups: Sequence[Group], state: Mapping[Tensor, State], plan: Plan, owners: Owners) -> dict[Tensor, Layer]:
    """Parameters with a gradient whose layer's owner finds the step: alone, where the layer has curvature.

    Where a process has rows of parameters alone, it does so for all layers.
    """
    blocks = [block for block in plan.blocks(groups, state) if owners.rows is not None or is_started(block)]
    return {p: block.layer for block in blocks for p in _with_gradient(block.layer)}


def _with_gradient(layer: Layer) -> list[Tensor]:
    """Parameters of a layer that have a gradient."""
    return [p for p in (layer.weight, layer.bias) if p is not None and p.grad is not None]


def _parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a layer with views of their entries in a matrix like W, each shaped like its parameter."""
    weight, bias = layer.geometry.columns(W, layer.weight.shape)
    parts = [(layer.weight, weight)]
    if layer.bias is not None and bias is not None:
        parts.append((layer.bias, bias))
    return parts


# ------------------------------------------------------------------ M ← βM + g


def _accumulate(momenta: _Momenta, group: Group, gate: Gate) -> None:
    """M ← βM + g for all momenta of a group, or M where the batch is not finite."""
    for Ms in _alike(momenta.whole, lambda M: (M.device, M.dtype)):
        torch._foreach_mul_(Ms, gate.choose(group["momentum"], 1.0, Ms[0]))
    # One tensor that is unlike the others, as columns of an M with a bias are, makes foreach go one by one.
    for pairs in _alike(momenta.parts, _kind_of_sum):
        torch._foreach_add_([M for M, _ in pairs], gate.gradients([grad for _, grad in pairs]))
    if group["step"] % _FLUSH_EVERY == 0:
        for M in momenta.whole:
            flush_(M)


def _kind_of_sum(pair: tuple[Tensor, Tensor]) -> Hashable:
    """What pairs have in common that foreach adds at once."""
    M, grad = pair
    return M.device, M.dtype, grad.dtype, M.is_contiguous()


def _alike(items: Iterable[T], kind: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """Items in groups of one kind."""
    kinds: dict[Hashable, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return kinds.values()


def _forget(momenta: Iterable[Tensor], gate: Gate) -> None:
    """M ← 0, or M where the batch is not finite: of parameters that were frozen while others of their layer move.

    Such a part of M would neither grow nor decay, and drive the others through H_G M H_A for ever.
    """
    for M in momenta:
        M.mul_(gate.choose(0.0, 1.0, M))


# ------------------------------------------------------------------ θ ← δ θ - r p


@dataclass(frozen=True)
class _Ready:
    """A layer with curvature, ready to move."""

    moving: _Moving
    group: Group
    step: Step


def _apart(
    group: Group,
    state: Mapping[Tensor, State],
    plan: Plan,
    moving: Mapping[Tensor, _Moving],
    rule: Others,
    direction: Direction,
    grad_norms: GradNorms,
    grads: Gradients,
) -> tuple[list[_Ready], list[Other]]:
    """What of a group moves: layers along H_G M H_A, and parameters that have no such direction."""
    layers, others = [], []
    for p in group["params"]:
        layer, found = plan.layers.get(p), moving.get(p)
        if found is not None:
            P = direction(found.layer, group, found.M)
            if P is None:
                others += [Other(q, grads[q], part, state[q]) for q, part in found.parts]
            else:
                for q, _ in found.parts:
                    rule.forget(state.get(q, {}))
                norms = [grad_norms[q] for q, _ in found.parts]
                layers.append(_Ready(found, group, Step(P, found.M, norms, group["momentum"], state[p])))
        elif layer is not None:
            for q in _with_gradient(layer):
                rule.forget(state.get(q, {}))
        elif p not in plan.covered and p in grads:
            others.append(Other(p, grads[p], _momentum_of(p, state[p]), state[p]))
    return layers, others


def _shrinks(groups: Sequence[Group]) -> Shrinks:
    """δ = 1 - αγ of each parameter, from its own group: a bias may have another γ than the weight of its layer."""
    shrinks: dict[Tensor, Rate] = {}
    for group in groups:
        shrinks.update(dict.fromkeys(group["params"], 1.0 - group["lr"] * group["weight_decay"]))
    return shrinks


def _moves_of_others(
    others: Sequence[Other], group: Group, rule: Others, shrinks: Shrinks, gate: Gate
) -> Iterator[Move]:
    """Moves of a group's parameters that have no block, or whose layer has no curvature."""
    lr, rate = group["lr"], rule.rate(group["lr"], group["damping"])
    for other, direction in zip(others, rule.directions(others, group, gate), strict=True):
        yield Move(other.p, direction, other.momentum, rate, lr, shrinks[other.p])


def _moves_of_layers(ready: Sequence[_Ready], rule: StepLength, shrinks: Shrinks, gate: Gate) -> Iterator[Move]:
    """Moves of layers; the lengths of all that are on one device and in one dtype are found together."""
    together: dict[Any, list[_Ready]] = {}
    for one in ready:
        together.setdefault((one.moving.M.device, one.moving.M.dtype), []).append(one)
    for members in together.values():
        found = rule.scales([one.step for one in members], gate)
        scales = [None] * len(members) if found is None else gate.numbers(found)
        for one, scale in zip(members, scales, strict=True):
            yield from _moves_of_layer(one, one.group["lr"] if scale is None else one.group["lr"] * scale, shrinks)


def _moves_of_layer(one: _Ready, rate: Rate, shrinks: Shrinks) -> Iterator[Move]:
    P = dict(_parts(one.moving.layer, one.step.direction))
    for p, M in one.moving.parts:
        yield Move(p, P[p], M, rate, rate, shrinks[p])
