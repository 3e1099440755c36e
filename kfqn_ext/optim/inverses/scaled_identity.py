"""H_G as it was at the start, a multiple of the identity: for layers whose ∂h̄ vanishes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext.optim.inverses.base import Measured, OutputInverse, Seen, State
from kfqn_ext.optim.inverses.unit import LossUnit, Unit


def inverse_damping(damping: Tensor) -> Tensor:
    """H_G⁰ = I / λ_G, ``algo_8``."""
    return 1.0 / damping


def identity(damping: Tensor) -> Tensor:
    """H_G⁰ = I, as in K-BFGS-20."""
    return torch.ones_like(damping)


@dataclass(frozen=True)
class ScaledIdentity(OutputInverse):
    """H_G = I / λ_G: no second pass, and no state but one number a block.

    What K-BFGS comes to where a convolution is followed by BatchNorm in training mode. Linear layers elsewhere learn
    much from H_G: do without it in all layers only where the network has BatchNorm.

    Attributes:
        initial: λ_G ↦ scale of H_G.
        unit: What a dense H_G counts in.
    """

    initial: Callable[[Tensor], Tensor] = inverse_damping
    unit: Unit = LossUnit()

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        state["gamma_G"] = self.initial(damping).to(like).clone()

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        """Follow the damping, as L-BFGS does; a dense H_G keeps what it started from, in its unit."""
        growth = self.unit.growth(states)
        if growth is not None and "gamma_G" not in states[0]:
            torch._foreach_div_([state["H_G"] for state in states], growth[..., None, None].unbind())
        for state, scale in zip(states, self.initial(damping), strict=True):
            if "gamma_G" in state:
                state["gamma_G"].copy_(scale)
                if "H_G" in state:  # which a limited-memory rule forms where it is small; here from no pair, as γI
                    state["H_G"].diagonal(dim1=-2, dim2=-1).copy_(scale.unsqueeze(-1))

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        # SecantBFGS has started with the number on the diagonal of its H_G.
        scale = state["gamma_G"] if "gamma_G" in state else state["H_G"][..., 0, 0]
        return M * scale[..., None, None].to(M.dtype)
