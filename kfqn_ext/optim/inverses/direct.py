"""Inverses that are computed, not learned: of this minibatch's A (``algo_7``), and of moving averages of factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.extensions import InputGram, KFACFactors
from kfqn_ext.linalg import damped_inverse
from kfqn_ext.optim.inverses.averages import Decay, check_decay, move_towards, where_finite
from kfqn_ext.optim.inverses.base import InputInverse, Inverse, Kinds, Measured, OutputInverse, Seen, State


def _mean_eigenvalue(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).mean(-1)


@dataclass(frozen=True)
class BatchInverse(InputInverse):
    """H_A = (A + λ_A I)⁻¹ with A of this minibatch alone, ``algo_7``."""

    first: ClassVar[Kinds] = (InputGram,)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        assert measured.A is not None
        state["H_A"] = damped_inverse(measured.A, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured, value in zip(states, seen.first, damping, strict=True):
            state["H_A"] = where_finite(damped_inverse(measured[InputGram].A, value), seen, state["H_A"])


@dataclass(frozen=True)
class AveragedFactor(Inverse):
    """(F + λ I)⁻¹ with a moving average of a factor F, as in ``line_11`` of ``algo_1``.

    Attributes:
        decay: β in F ← βF + (1 - β) F of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    decay: Decay = 0.9
    average: ClassVar[str]
    """The average's name in a state; ``recomputed`` has the inverse's."""

    def __post_init__(self) -> None:
        """Check β."""
        check_decay(self.decay)

    def factor(self, measured: Measured) -> Tensor:
        """F of this minibatch, [*B, d, d], from what was measured of a layer."""
        raise NotImplementedError

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        state[self.average] = self.factor(measured)
        self.update_inverse(state, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured in zip(states, seen.second if self.second else seen.first, strict=True):
            move_towards(state[self.average], self.factor(measured), self.decay, seen)

    def update_inverse(self, state: State, damping: Tensor) -> None:  # noqa: D102
        (name,) = self.recomputed
        state[name] = damped_inverse(state[self.average], damping)

    def trace(self, state: State) -> Tensor | None:  # noqa: D102
        return _mean_eigenvalue(state[self.average])


@dataclass(frozen=True)
class MovingInverse(AveragedFactor, InputInverse):
    """H_A = (A + λ_A I)⁻¹ with a moving average A: H_Ω of ``algo_1``, from the pass that training runs anyway.

    A = Ω, [*B, d_in, d_in], is a mean over data of sums over locations.

    Attributes:
        decay: β in A ← βA + (1 - β) A of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    average: ClassVar[str] = "A"
    first: ClassVar[Kinds] = (KFACFactors,)  # as FisherInverse: A is formed once for both
    starts_from: ClassVar[Kinds] = (KFACFactors,)
    recomputed: ClassVar[tuple[str, ...]] = ("H_A",)

    def factor(self, measured: Measured) -> Tensor:  # noqa: D102
        return measured[KFACFactors].Omega


@dataclass(frozen=True)
class FisherInverse(AveragedFactor, OutputInverse):
    """H_G = (Γ̂ + ε I)⁻¹ with a moving average Γ̂ of the minibatches' own Γ, each in units of its mean eigenvalue.

    H_Γ of ``algo_1`` with the data's targets, from the pass that training runs anyway. Γ, [*B, d_out, d_out], is a mean
    over data and locations of ∂h ∂hᵀ, with ∂h of each datum's own loss. These gradients vanish with the
    loss, and Γ with them; Γ̂ does not, and neither the loss's scale nor a gradient scaler's is in it.

    Γ̂ starts from I. At first all data's gradients point the same way, and the inverse of their own Γ alone would undo
    the very direction in which the loss falls.

    Attributes:
        decay: β in Γ̂ ← βΓ̂ + (1 - β) Γ̂ of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    average: ClassVar[str] = "Gamma"
    first: ClassVar[Kinds] = (KFACFactors,)
    in_own_units: ClassVar[bool] = True
    recomputed: ClassVar[tuple[str, ...]] = ("H_G",)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        state[self.average] = torch.diag_embed(torch.ones_like(like)).contiguous()
        self.update_inverse(state, damping)

    def factor(self, measured: Measured) -> Tensor:
        """Γ ÷ its mean eigenvalue; zero where Γ is."""
        Gamma = measured[KFACFactors].Gamma
        mean = _mean_eigenvalue(Gamma).clamp(min=torch.finfo(Gamma.dtype).tiny)
        return Gamma / mean.unsqueeze(-1).unsqueeze(-1)

    def trace(self, state: State) -> Tensor | None:
        """None: Γ̂ counts in units of it."""
        return None


@dataclass(frozen=True)
class OmegaInverse(AveragedFactor, InputInverse):
    """H_Ω = (Ω + λ_A I)⁻¹ with a moving average Ω, ``line_11`` of ``algo_1``.

    Attributes:
        decay: β in Ω ← βΩ + (1 - β) Ω of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    average: ClassVar[str] = "Omega"
    second: ClassVar[Kinds] = (KFACFactors,)
    starts_from: ClassVar[Kinds] = (KFACFactors,)
    recomputed: ClassVar[tuple[str, ...]] = ("H_A",)

    def factor(self, measured: Measured) -> Tensor:  # noqa: D102
        return measured[KFACFactors].Omega


@dataclass(frozen=True)
class GammaInverse(AveragedFactor, OutputInverse):
    """H_Γ = (Γ + λ_G I)⁻¹ with a moving average Γ from sampled targets, ``line_11`` of ``algo_1``.

    Attributes:
        decay: β in Γ ← βΓ + (1 - β) Γ of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    average: ClassVar[str] = "Gamma"
    fisher: ClassVar[bool] = True
    second: ClassVar[Kinds] = (KFACFactors,)
    starts_from: ClassVar[Kinds] = (KFACFactors,)
    recomputed: ClassVar[tuple[str, ...]] = ("H_G",)

    def factor(self, measured: Measured) -> Tensor:  # noqa: D102
        return measured[KFACFactors].Gamma
