"""How the damping λ of a layer's block is shared by its two factors: λ ↦ (λ_A, λ_G) with λ_A λ_G = λ."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Balance:
    """What is known of the sizes of a layer's two factors.

    Attributes:
        num_locations: |T|.
        power_A: tr(A) / d_in, [*B], or None where nothing measures it.
        power_G: tr(Γ) / d_out, [*B], or None.
    """

    num_locations: float
    power_A: Tensor | None = None
    power_G: Tensor | None = None


Split = Callable[[float, Balance], tuple[float | Tensor, float | Tensor]]


def spatial(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = √|T| √λ and λ_G = √λ / √|T|, ``algo_8``: as if both factors were sums over √|T| locations."""
    T = balance.num_locations
    return (damping * T) ** 0.5, (damping / T) ** 0.5


def equal(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = λ_G = √λ, as K-BFGS-20 splits it; π = 1 for KFAC."""
    return damping**0.5, damping**0.5


def trace(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = π √λ and λ_G = √λ / π with π² = (tr(A) / d_in) / (tr(Γ) / d_out), ``line_11`` of ``algo_1``.

    π is held between 10⁻³ and 10³: a factor that is zero says nothing about the other.
    """
    assert balance.power_A is not None and balance.power_G is not None
    tiny = torch.finfo(balance.power_A.dtype).tiny
    pi = (balance.power_A.clamp(min=tiny) / balance.power_G.clamp(min=tiny)).sqrt().clamp(1e-3, 1e3)
    return pi * damping**0.5, damping**0.5 / pi


@dataclass(frozen=True)
class Given:
    """λ_A and λ_G as numbers of their own, as in ``algo_7``."""

    damping_A: float
    damping_G: float

    def __call__(self, damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
        """Return (λ_A, λ_G)."""
        return self.damping_A, self.damping_G
