"""Momentum, direction and step of single parameters, in place and without waiting for the device."""

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


@dataclass(frozen=True)
class Move:
    """A parameter's step θ ← θ - r p - δ θ.

    Attributes:
        p: The parameter θ.
        direction: p.
        momentum: M, reshapable to θ's shape.
        rate: r.
        lr: α.
        decay: δ = αγ.
    """

    p: Tensor
    direction: Tensor
    momentum: Tensor
    rate: Rate
    lr: Rate
    decay: Rate

    def squared_length(self) -> Tensor:
        """α r ⟨p, M⟩: with r p = α H M, the step's squared length α² ⟨M, H M⟩ in the norm of H⁻¹."""
        return (self.direction.flatten() * self.momentum.reshape(-1)).sum() * self.rate * self.lr


def working_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: its own, float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)


def accumulate(M: Tensor, grad: Tensor, group: dict[str, Any], finite: Tensor) -> None:
    """M ← βM + g, or M where the batch is not finite. 0 · NaN is NaN, so this selects instead of multiplying."""
    M.mul_(_choose(finite, group["momentum"], 1.0, M)).add_(torch.where(finite, grad, 0.0))
    if group["step"] % _FLUSH_EVERY == 0:
        flush_(M)


def apply(move: Move, finite: Tensor) -> None:
    """Take a move, unless the batch is not finite."""
    p = move.p
    if isinstance(move.decay, Tensor) or move.decay:
        p.mul_(1.0 - _choose(finite, move.decay, 0.0, p))
    # A direction comes from M, which is finite whatever the batch was: a rate of zero leaves p alone.
    p.addcmul_(move.direction, _choose(finite, move.rate, 0.0, move.direction), value=-1.0)


def shortening(moves: list[Move], loss: Tensor, cap: float) -> Tensor:
    """ν ≤ 1 with ν² Σ α r ⟨p, M⟩ ≤ κ |f|: the squared length of the whole step is at most a share of the loss."""
    square = torch.stack([move.squared_length() for move in moves]).sum()
    limit = cap * loss.detach().abs().to(square)
    return (limit / square.clamp(min=torch.finfo(square.dtype).tiny)).sqrt().clamp(max=1.0)


def _choose(finite: Tensor, value: Rate, otherwise: float, like: Tensor) -> Tensor:
    """A number on the device, in the dtype that it is used in: ``torch.where`` of two floats would be a float32."""
    chosen = value.reshape(()) if isinstance(value, Tensor) else value
    return torch.full((), otherwise, dtype=like.dtype, device=like.device).masked_fill(finite, chosen)


def momentum_of(p: Tensor, state: State, group: dict[str, Any], finite: Tensor) -> Tensor:
    """Update and return the momentum of a parameter without a Kronecker block."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(p, dtype=working_dtype(p))
    assert p.grad is not None
    accumulate(state["momentum"], p.grad, group, finite)
    return state["momentum"]


def layer_momentum(layer: Layer, state: State, group: dict[str, Any], finite: Tensor) -> Tensor:
    """Update and return the momentum of a layer's W, [*B, d_out, d_in]."""
    if "momentum" not in state:
        weight = layer.weight
        state["momentum"] = torch.zeros(layer.geometry.matrix_shape, dtype=working_dtype(weight), device=weight.device)
    for p, part in layer_parts(layer, state["momentum"]):
        assert p.grad is not None
        accumulate(part, p.grad.reshape(part.shape), group, finite)
    return state["momentum"]


def layer_parts(layer: Layer, W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a layer that have a gradient, each with its columns of a matrix like W."""
    inner = layer.geometry.d_in - layer.geometry.has_bias
    parts = [(layer.weight, W[..., :inner])]
    if layer.bias is not None:
        parts.append((layer.bias, W[..., inner]))
    return [(p, part) for p, part in parts if p.grad is not None]
