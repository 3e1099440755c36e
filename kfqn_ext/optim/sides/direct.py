"""Inverses that are computed, not learned: of this minibatch's A (``algo_7``), and of KFAC's moving averages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kfqn_ext.linalg import damped_inverse
from kfqn_ext.optim.sides.base import InputSide, Kind, Measured, OutputSide, Seen, State
from kfqn_ext.optim.sides.moving_average import Decay, check_decay, move_towards


def _mean_eigenvalue(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).mean(-1)


@dataclass(frozen=True)
class BatchInverse(InputSide):
    """H_A = (A + λ_A I)⁻¹ with A of this minibatch alone, ``algo_7``."""

    first: ClassVar[tuple[Kind, ...]] = ("gram",)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:  # noqa: D102
        state["H_A"] = damped_inverse(A, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured, value in zip(states, seen.first, damping, strict=True):
            assert measured.A is not None
            inverse = damped_inverse(measured.A, value)
            finite = torch.isfinite(inverse).all(-1, keepdim=True).all(-2, keepdim=True) & seen.finite
            state["H_A"] = torch.where(finite, inverse, state["H_A"])


@dataclass(frozen=True)
class OmegaInverse(InputSide):
    """H_Ω = (Ω + λ_A I)⁻¹ with a moving average Ω, ``algo_1``.

    Attributes:
        decay: β in Ω ← βΩ + (1 - β) Ω of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    decay: Decay = 0.9
    second: ClassVar[tuple[Kind, ...]] = ("factors",)
    starts_from: ClassVar[tuple[Kind, ...]] = ("factors",)

    def __post_init__(self) -> None:
        """Check β."""
        check_decay(self.decay)

    def start(self, state: State, A: Tensor, damping: Tensor) -> None:  # noqa: D102
        state["Omega"], state["H_A"] = A, damped_inverse(A, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured in zip(states, seen.second, strict=True):
            assert measured.factors is not None
            move_towards(state["Omega"], measured.factors.Omega, self.decay, seen)

    def refresh(self, state: State, damping: Tensor) -> None:  # noqa: D102
        state["H_A"] = damped_inverse(state["Omega"], damping)

    def power(self, state: State) -> Tensor | None:  # noqa: D102
        return _mean_eigenvalue(state["Omega"])


@dataclass(frozen=True)
class GammaInverse(OutputSide):
    """H_Γ = (Γ + λ_G I)⁻¹ with a moving average Γ from sampled targets, ``algo_1``.

    Attributes:
        decay: β in Γ ← βΓ + (1 - β) Γ of this minibatch, or k ↦ β: :func:`~kfqn_ext.optim.running_mean`.
    """

    decay: Decay = 0.9
    second: ClassVar[tuple[Kind, ...]] = ("factors",)
    starts_from: ClassVar[tuple[Kind, ...]] = ("factors",)

    def __post_init__(self) -> None:
        """Check β."""
        check_decay(self.decay)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        assert measured.factors is not None
        state["Gamma"] = measured.factors.Gamma
        state["H_G"] = damped_inverse(state["Gamma"], damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, measured in zip(states, seen.second, strict=True):
            assert measured.factors is not None
            move_towards(state["Gamma"], measured.factors.Gamma, self.decay, seen)

    def refresh(self, state: State, damping: Tensor) -> None:  # noqa: D102
        state["H_G"] = damped_inverse(state["Gamma"], damping)

    def power(self, state: State) -> Tensor | None:  # noqa: D102
        return _mean_eigenvalue(state["Gamma"])
