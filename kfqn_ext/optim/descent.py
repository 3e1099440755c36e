"""Momentum and step of all parameters, in place, without waiting for the device and in few operations.

A layer's W = [weight, bias] moves as one matrix; which entries of a matrix are the weight's, its geometry knows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.linalg import flush_
from kfqn_ext.optim.groups.plan import Layer, Plan, working_dtype
from kfqn_ext.optim.inverses import State
from kfqn_ext.optim.preconditioner.block import momentum
from kfqn_ext.optim.recipe import Rate

Group = dict[str, Any]
Direction = Callable[[Layer, Group, Tensor], Tensor | None]
"""(layer, its group, M) ↦ P = H_G M H_A, or None for a layer without curvature, which moves along M."""
# A momentum shrinks to 0.005 of itself in so many steps at β = 0.9: far from subnormal, at no cost worth a mention.
_FLUSH_EVERY = 50


def descend(
    groups: Sequence[Group],
    state: Mapping[Tensor, State],
    plan: Plan,
    direction: Direction,
    fallback_rate: Callable[[Rate, float], Rate],
    finite: Tensor,
    limit: Tensor | None = None,
) -> None:
    """Move all parameters that have a gradient: M ← βM + g, then θ ← θ - α (p + γθ).

    The second is ``line_14`` of ``algo_8`` with the weight decay of ``sec_5``.

    Args:
        groups: Parameter groups.
        state: The optimizer's; momenta are made in it where there are none.
        plan: Which parameters form layers.
        direction: p of a layer.
        fallback_rate: (α, λ) ↦ the rate of what moves along its momentum.
        finite: Whether the batch is, bool []; nothing changes where it is not.
        limit: Bound on the squared length of the whole step in the preconditioned norm, []; None for none.
    """
    gate = Gate(finite)
    for group in groups:
        _forget(_idle_momenta(group, state, plan), gate)
        _accumulate(list(_momenta(group, state, plan)), group, gate)
    moves = [move for group in groups for move in _moves(group, state, plan, direction, fallback_rate)]
    if limit is not None:
        shorten = _shortening(moves, limit)
        moves = [replace(move, rate=move.rate * shorten) for move in moves]
    for move in moves:
        _apply(move, gate)


class Gate:
    """Numbers for a step that has to change nothing where the batch is not finite, without asking whether it is.

    Each is made once a step: on a GPU two launches a parameter would cost more than the step's arithmetic.
    """

    def __init__(self, finite: Tensor) -> None:
        """``finite``, bool [], says whether the batch is."""
        self._finite = finite
        self._chosen: dict[Any, tuple[Rate, Tensor]] = {}

    def choose(self, value: Rate, otherwise: float, like: Tensor) -> Tensor:
        """``value``, or ``otherwise`` where the batch is not finite: [], in the dtype in which it is used."""
        # A tensor counts by its identity, which is its own as long as the value is kept.
        key = (id(value) if isinstance(value, Tensor) else value, otherwise, like.dtype, like.device)
        if key not in self._chosen:
            # Not masked_fill, for which a GPU makes the host wait where the value is a tensor.
            chosen = value.reshape(()).to(like) if isinstance(value, Tensor) else _number(value, like)
            self._chosen[key] = value, torch.where(self._finite.to(like.device), chosen, _number(otherwise, like))
        return self._chosen[key][1]


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Move:
    """A parameter's step θ ← δ θ - r p.

    Attributes:
        p: The parameter θ.
        direction: p, shaped like θ.
        momentum: M, shaped like θ.
        rate: r.
        lr: α.
        shrink: δ = 1 - αγ.
    """

    p: Tensor
    direction: Tensor
    momentum: Tensor
    rate: Rate
    lr: Rate
    shrink: Rate

    def squared_length(self) -> Tensor:
        """α r ⟨p, M⟩: with r p = α H M, the step's squared length α² ⟨M, H M⟩ in the norm of H⁻¹."""
        return (self.direction.flatten() * self.momentum.reshape(-1)).sum() * self.rate * self.lr


# ------------------------------------------------------------------ which momentum is whose


def _momenta(group: Group, state: Mapping[Tensor, State], plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Each gradient of a group, after the part of the momentum that it belongs to."""
    for p in group["params"]:
        layer = plan.layers.get(p)
        if layer is not None and _has_gradient(layer):
            for q, part in _moving_parts(layer, momentum(layer, state[p])):
                assert q.grad is not None
                yield part, q.grad
        elif p not in plan.covered and p.grad is not None:
            yield _momentum_of(p, state[p]), p.grad


def _idle_momenta(group: Group, state: Mapping[Tensor, State], plan: Plan) -> Iterator[Tensor]:
    """Parts of a group's momenta whose parameter has no gradient, though its layer has one."""
    for p in group["params"]:
        layer = plan.layers.get(p)
        if layer is not None and _has_gradient(layer):
            yield from (part for q, part in _parts(layer, momentum(layer, state[p])) if q.grad is None)


def _momentum_of(p: Tensor, state: State) -> Tensor:
    """The momentum of a parameter without a Kronecker block, in its state."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(p, dtype=working_dtype(p))
    return state["momentum"]


def _has_gradient(layer: Layer) -> bool:
    return layer.weight.grad is not None or (layer.bias is not None and layer.bias.grad is not None)


def _moving_parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a layer that have a gradient, each with its part of a matrix like W."""
    return [(p, part) for p, part in _parts(layer, W) if p.grad is not None]


def _parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a layer with views of their entries in a matrix like W, each shaped like its parameter."""
    weight, bias = layer.geometry.columns(W, layer.weight.shape)
    parts = [(layer.weight, weight)]
    if layer.bias is not None and bias is not None:
        parts.append((layer.bias, bias))
    return parts


# ------------------------------------------------------------------ M ← βM + g


def _accumulate(momenta: Sequence[tuple[Tensor, Tensor]], group: Group, gate: Gate) -> None:
    """M ← βM + g for pairs of a momentum and a gradient, or M where the batch is not finite."""
    # One tensor that is unlike the others, as columns of an M with a bias are, makes foreach go one by one.
    kinds: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for M, grad in momenta:
        kinds.setdefault((M.device, M.dtype, grad.dtype, M.is_contiguous()), []).append((M, grad))
    for pairs in kinds.values():
        Ms = [M for M, _ in pairs]
        # 0 · NaN is NaN; and of a batch that is not finite the other gradients don't count either.
        grads = [torch.nan_to_num(grad) for _, grad in pairs]
        torch._foreach_mul_(grads, gate.choose(1.0, 0.0, grads[0]))
        torch._foreach_mul_(Ms, gate.choose(group["momentum"], 1.0, Ms[0]))
        torch._foreach_add_(Ms, grads)
        if group["step"] % _FLUSH_EVERY == 0:
            for M in Ms:
                flush_(M)


def _forget(momenta: Iterable[Tensor], gate: Gate) -> None:
    """M ← 0, or M where the batch is not finite: of parameters that were frozen while others of their layer move.

    Such a part of M would neither grow nor decay, and drive the others through H_G M H_A for ever.
    """
    for M in momenta:
        M.mul_(gate.choose(0.0, 1.0, M))


# ------------------------------------------------------------------ θ ← δ θ - r p


def _moves(
    group: Group,
    state: Mapping[Tensor, State],
    plan: Plan,
    direction: Direction,
    fallback_rate: Callable[[Rate, float], Rate],
) -> Iterator[Move]:
    """All moves of a group."""
    lr, slow = group["lr"], fallback_rate(group["lr"], group["damping"])
    shrink = 1.0 - lr * group["weight_decay"]
    for p in group["params"]:
        layer = plan.layers.get(p)
        if layer is not None and _has_gradient(layer):
            M = momentum(layer, state[p])
            P = direction(layer, group, M)
            rate, P = (slow, M) if P is None else (lr, P)
            for (q, part), (_, m) in zip(_moving_parts(layer, P), _moving_parts(layer, M), strict=True):
                yield Move(q, part, m, rate, lr, shrink)
        elif p not in plan.covered and p.grad is not None:
            M = _momentum_of(p, state[p])
            yield Move(p, M, M, slow, lr, shrink)


def _shortening(moves: Sequence[Move], limit: Tensor) -> Tensor:
    """ν ≤ 1 with ν² Σ α r ⟨p, M⟩ ≤ a limit, []."""
    square = torch.stack([move.squared_length() for move in moves]).sum()
    return (limit.to(square) / square.clamp(min=torch.finfo(square.dtype).tiny)).sqrt().clamp(max=1.0)


def _apply(move: Move, gate: Gate) -> None:
    """Take a move, unless the batch is not finite."""
    p = move.p
    if isinstance(move.shrink, Tensor) or move.shrink != 1.0:
        p.mul_(gate.choose(move.shrink, 1.0, p))
    # A direction comes from M, which is finite whatever the batch was: a rate of zero leaves p alone.
    p.addcmul_(move.direction, gate.choose(move.rate, 0.0, move.direction), value=-1.0)
