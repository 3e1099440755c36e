"""Double damping: pairs that keep a quasi-Newton matrix positive definite and bounded on a nonconvex function.

Each function maps a pair (s, y) to a damped pair, given H y for the inverse H that is to be updated with it.
They share one signature, so that an optimizer's recipe can name any of them.
"""

import torch
from torch import Tensor

from kfqn_ext.linalg.pairs import dot


def _powell(s: Tensor, y: Tensor, Hy: Tensor, mu1: float) -> Tensor:
    """Powell's damping on H: move s towards Hy until sᵀy ≥ μ₁ yᵀHy."""
    sy, yHy = dot(s, y), dot(y, Hy)
    damped = sy < mu1 * yHy
    gap = torch.where(damped, yHy - sy, 1.0)  # ≥ (1 - μ₁) yᵀHy > 0 where it is used
    theta = torch.where(damped, (1.0 - mu1) * yHy / gap, 1.0)
    return theta * s + (1.0 - theta) * Hy


def powell_lm(s: Tensor, y: Tensor, Hy: Tensor, mu1: float, mu2: float | Tensor) -> tuple[Tensor, Tensor]:
    """Powell's damping on H, then Levenberg-Marquardt damping on H⁻¹: D_P D_LM, ``algo_5``.

    Guarantees s̃ᵀy ≥ μ₁ yᵀHy and s̃ᵀỹ ≥ μ₂ ‖s̃‖².

    Args:
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].
        Hy: H y for the current inverse H, [*B, d].
        mu1: 0 < μ₁ < 1.
        mu2: μ₂ > 0; the damping λ_G: a number, or [*B, 1].

    Returns:
        (s̃, ỹ), each [*B, d].
    """
    s = _powell(s, y, Hy, mu1)
    return s, y + mu2 * s


def powell_identity_lm(s: Tensor, y: Tensor, Hy: Tensor, mu1: float, mu2: float | Tensor) -> tuple[Tensor, Tensor]:
    """Double damping with H = I/μ₂ in place of the current inverse: D_P(I) D_LM, ``algo_6``.

    Guarantees ``lemma_3``: ‖s̃‖² / s̃ᵀỹ ≤ 1/μ₂ and ‖ỹ‖² / s̃ᵀỹ ≤ 1/μ₃ with μ₃ = μ₁ / (μ₂ (1 + 2μ₁)).

    Args:
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].
        Hy: Not used.
        mu1: 0 < μ₁ < 1.
        mu2: μ₂ > 0; the damping λ_G: a number, or [*B, 1].

    Returns:
        (s̃, ỹ), each [*B, d].
    """
    return powell_lm(s, y, y / mu2, mu1, mu2)


def double_damping_2020(s: Tensor, y: Tensor, Hy: Tensor, mu1: float, mu2: float | Tensor) -> tuple[Tensor, Tensor]:
    """Powell's damping on H, then Powell's damping on H⁻¹ with the identity: K-BFGS-20's procedure.

    From Goldfarb, Ren and Bahamou, "Practical quasi-Newton methods for training deep neural networks" (2020).
    Guarantees s̃ᵀỹ ≥ μ₂ ‖s̃‖², like D_P D_LM, but only for μ₂ ≤ 1: a larger μ₂ acts as 1.

    Args:
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].
        Hy: H y for the current inverse H, [*B, d].
        mu1: 0 < μ₁ < 1.
        mu2: μ₂ > 0; the damping λ_G: a number, or [*B, 1].

    Returns:
        (s̃, ỹ), each [*B, d].
    """
    s = _powell(s, y, Hy, mu1)
    sy, ss = dot(s, y), dot(s, s)
    mu2 = torch.as_tensor(mu2, dtype=s.dtype, device=s.device).clamp(max=1.0)
    damped = sy < mu2 * ss
    gap = torch.where(damped, ss - sy, 1.0)
    theta = torch.where(damped, (1.0 - mu2) * ss / gap, 1.0)
    return s, theta * y + (1.0 - theta) * s
