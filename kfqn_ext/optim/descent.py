"""Momentum and step of all parameters, in place, without waiting for the device and in few operations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.linalg import flush_
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.recipe import Rate
from kfqn_ext.optim.sides import State

# A momentum shrinks to 0.005 of itself in so many steps at β = 0.9: far from subnormal, at no cost worth a mention.
_FLUSH_EVERY = 50


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
        direction: p.
        momentum: M, reshapable to θ's shape.
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


def working_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: its own, float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)


def accumulate(momenta: Sequence[tuple[Tensor, Tensor]], group: dict[str, Any], gate: Gate) -> None:
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


def forget(momenta: Iterable[Tensor], gate: Gate) -> None:
    """M ← 0, or M where the batch is not finite: of parameters that were frozen while others of their layer move.

    Such a part of M would neither grow nor decay, and drive the others through H_G M H_A for ever.
    """
    for M in momenta:
        M.mul_(gate.choose(0.0, 1.0, M))


def apply(move: Move, gate: Gate) -> None:
    """Take a move, unless the batch is not finite."""
    p = move.p
    if isinstance(move.shrink, Tensor) or move.shrink != 1.0:
        p.mul_(gate.choose(move.shrink, 1.0, p))
    # A direction comes from M, which is finite whatever the batch was: a rate of zero leaves p alone.
    p.addcmul_(move.direction, gate.choose(move.rate, 0.0, move.direction), value=-1.0)


def shortening(moves: list[Move], loss: Tensor, cap: float) -> Tensor:
    """ν ≤ 1 with ν² Σ α r ⟨p, M⟩ ≤ κ |f|: the squared length of the whole step is at most a share of the loss."""
    square = torch.stack([move.squared_length() for move in moves]).sum()
    limit = cap * loss.detach().abs().to(square)
    return (limit / square.clamp(min=torch.finfo(square.dtype).tiny)).sqrt().clamp(max=1.0)


def momentum_of(p: Tensor, state: State) -> Tensor:
    """The momentum of a parameter without a Kronecker block, in its state."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(p, dtype=working_dtype(p))
    return state["momentum"]


def layer_momentum(layer: Layer, state: State) -> Tensor:
    """The momentum of a layer's W, [*B, d_out, d_in], in its weight's state."""
    if "momentum" not in state:
        weight = layer.weight
        state["momentum"] = torch.zeros(layer.geometry.matrix_shape, dtype=working_dtype(weight), device=weight.device)
    return state["momentum"]


def moving_parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a layer that have a gradient, each with its columns of a matrix like W."""
    return [(p, part) for p, part in _parts(layer, W) if p.grad is not None]


def idle_parts(layer: Layer, W: Tensor) -> list[Tensor]:
    """Columns of a matrix like W that belong to the layer's other parameters."""
    return [part for p, part in _parts(layer, W) if p.grad is None]


def _parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    inner = layer.geometry.d_in - layer.geometry.has_bias
    parts = [(layer.weight, W[..., :inner])]
    if layer.bias is not None:
        parts.append((layer.bias, W[..., inner]))
    return parts
