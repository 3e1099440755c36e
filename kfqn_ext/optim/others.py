"""What moves parameters without a Kronecker block: of normalizations, embeddings, layers that can't be measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kfqn_ext._torch import rows_of
from kfqn_ext.optim.gate import Gate, Rate
from kfqn_ext.optim.inverses.base import State
from kfqn_ext.optim.numbers import as_real

__all__ = ["AdamW", "Momentum", "Other", "Others", "over_damping", "plain"]


@dataclass(frozen=True)
class Other:
    """A parameter that has no block, or whose layer has no curvature.

    Attributes:
        p: The parameter θ.
        grad: Its gradient, or the rows of it that are here.
        kept: M of this step, as it is kept: shaped like θ, and divided among processes as θ is.
        state: The optimizer's state of it, in which a rule may keep tensors.
    """

    p: Tensor
    grad: Tensor
    kept: Tensor
    state: State

    @cached_property
    def momentum(self) -> Tensor:
        """M, or the rows of it that are here; of a complex one, [..., 2]."""
        return as_real(rows_of(self.kept))


class Others:
    """A rule for such parameters, without state of its own."""

    title: ClassVar[str]
    """What ``repr(optimizer)`` calls their treatment."""

    def start(self, state: State, like: Tensor) -> None:
        """Make what the rule keeps of a parameter; ``like`` is an M, as it is kept."""

    def forget(self, state: State) -> None:
        """Drop what the rule keeps of a parameter whose layer has curvature now."""

    def directions(self, others: Sequence[Other], group: Mapping[str, Any], gate: Gate) -> Sequence[Tensor]:
        """What each parameter moves along.

        Args:
            others: Parameters of one group.
            group: The group.
            gate: Says whether the minibatch is finite; where it is not, states stay as they are.

        Returns:
            One for each, shaped like its :attr:`Other.momentum`, and in its dtype.
        """
        raise NotImplementedError

    def rate(self, lr: Rate, damping: float) -> Rate:
        """The rate of these directions, from α and λ."""
        raise NotImplementedError


def over_damping(lr: Rate, damping: float) -> Rate:
    """α / λ, ``sec_18``: the step of K-BFGS where the curvature is small beside the damping.

    Args:
        lr: α.
        damping: λ.
    """
    return lr / damping


def plain(lr: Rate, damping: float) -> Rate:
    """α, as KFAC steps its BatchNorm parameters, ``sec_10``.

    Args:
        lr: α.
        damping: Is not read.
    """
    return lr


@dataclass(frozen=True)
class Momentum(Others):
    """They move along their momentum, as in the paper.

    Attributes:
        rate_of: (α, λ) ↦ the rate.
    """

    rate_of: Callable[[Rate, float], Rate] = over_damping
    title: ClassVar[str] = "momentum"

    def directions(self, others: Sequence[Other], group: Mapping[str, Any], gate: Gate) -> Sequence[Tensor]:  # noqa: D102
        return [other.momentum for other in others]

    def rate(self, lr: Rate, damping: float) -> Rate:  # noqa: D102
        return self.rate_of(lr, damping)


@dataclass(frozen=True)
class AdamW(Others):
    """They move as with ``torch.optim.AdamW``, with β₁ = β and the weight decay of their group.

    Its first moment is the momentum over its weight, M / Σ βⁱ, so that only the second one is kept beside it.

    Attributes:
        ratio: Their rate in multiples of α, which is the length of a layer's step.
        beta2: β₂.
        eps: ε.
    """

    ratio: float = 0.1
    beta2: float = 0.999
    eps: float = 1e-8
    title: ClassVar[str] = "AdamW"

    def start(self, state: State, like: Tensor) -> None:  # noqa: D102
        state["exp_avg_sq"] = torch.zeros_like(like, memory_format=torch.preserve_format)
        state["weights"] = rows_of(like).new_zeros(2)  # of M, and of the second moment

    def forget(self, state: State) -> None:  # noqa: D102
        state.pop("exp_avg_sq", None)
        state.pop("weights", None)

    def directions(self, others: Sequence[Other], group: Mapping[str, Any], gate: Gate) -> Sequence[Tensor]:  # noqa: D102
        akin: dict[Any, list[Other]] = {}
        for other in others:
            akin.setdefault((other.momentum.device, other.momentum.dtype), []).append(other)
        found = {}
        for members in akin.values():
            directions = self._directions(members, group["momentum"], gate)
            found.update({other.p: P for other, P in zip(members, directions, strict=True)})
        return [found[other.p] for other in others]

    def _directions(self, others: Sequence[Other], beta1: float, gate: Gate) -> Sequence[Tensor]:
        """Those of parameters on one device and in one dtype."""
        momenta, like = [other.momentum for other in others], others[0].momentum
        # Closed before they are squared: the largest number's square is infinite.
        grads = gate.gradients([as_real(other.grad).to(like.dtype) for other in others])
        for other, g in zip(others, grads, strict=True):
            if "exp_avg_sq" not in other.state:
                self.start(other.state, as_real(other.kept))
                # A momentum that holds more than this gradient is of a layer that had curvature, and old.
                is_new = (g == other.momentum).all()
                other.state["weights"][0] = torch.where(is_new, 0.0, 1.0 / (1.0 - beta1))
        squares = [rows_of(other.state["exp_avg_sq"]) for other in others]
        torch._foreach_mul_(squares, gate.choose(self.beta2, 1.0, like))
        torch._foreach_addcmul_(squares, grads, grads, value=1.0 - self.beta2)
        first, second = self._weigh([other.state["weights"] for other in others], beta1, gate)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, gate.numbers(second.sqrt()))
        torch._foreach_add_(sizes, self.eps)
        torch._foreach_mul_(sizes, gate.numbers(first))
        return torch._foreach_div(momenta, sizes)

    def _weigh(self, kept: Sequence[Tensor], beta1: float, gate: Gate) -> tuple[Tensor, Tensor]:
        """Sums of the weights in the two moments, after this minibatch: [L], [L]."""
        before = torch.stack(list(kept))
        first, second = before.unbind(1)
        after = torch.stack((beta1 * first + 1.0, self.beta2 * second + (1.0 - self.beta2)), dim=1)
        after = gate.kept(before, after)
        torch._foreach_copy_(list(kept), after.unbind())
        first, second = torch.where(after > 0, after, 1.0).unbind(1)  # zero before any finite minibatch
        return first, second

    def rate(self, lr: Rate, damping: float) -> Rate:  # noqa: D102
        return self.ratio * lr
