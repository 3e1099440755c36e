"""How far a matrix is from the exact block, and how good a direction it gives.

Matrices are [G, p, p], symmetric; the G blocks of a layer with channel groups count as one block-diagonal matrix.
Directions are [G, p]. Every function returns a number.
"""

import math

import torch
from torch import Tensor


def relative_error(approximation: Tensor, exact: Tensor) -> float:
    """‖approximation - exact‖_F / ‖exact‖_F."""
    return ratio(torch.linalg.vector_norm(approximation - exact), torch.linalg.vector_norm(exact))


def cosine(first: Tensor, second: Tensor) -> float:
    """⟨first, second⟩ / (‖first‖ ‖second‖) in the Frobenius sense, quality but for a common factor; NaN with zero."""
    norms = float(torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second))
    return float((first * second).sum()) / norms if norms else math.nan


def eigenvalues(matrix: Tensor) -> Tensor:
    """All eigenvalues, ascending: [G, p, p] → [G · p]."""
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values.flatten().sort().values


def spectral_norm(values: Tensor) -> Tensor:
    """Largest eigenvalue in absolute value."""
    return values.abs().max()


def negative_mass(values: Tensor) -> float:
    """Share of negative eigenvalues: Σ_{λ<0} |λ| / Σ |λ|."""
    return ratio(values.clamp(max=0).abs().sum(), values.abs().sum())


def damped_solve(matrix: Tensor, damping: float, gradient: Tensor) -> Tensor:
    """(matrix + λI)⁻¹ g: [G, p, p], [G, p] → [G, p]; not finite where the sum is singular."""
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    solution, info = torch.linalg.solve_ex(damped, gradient)
    return torch.where(info.unsqueeze(-1) == 0, solution, math.nan)


def angle(first: Tensor, second: Tensor) -> float:
    """Angle between two directions, in degrees."""
    value = cosine(first, second)
    return math.degrees(math.acos(max(-1.0, min(1.0, value)))) if math.isfinite(value) else math.nan


def best_decrease(gradient: Tensor, direction: Tensor, curvature_along: Tensor | float) -> float:
    """Decrease of the quadratic model along -α · direction at its best step α > 0.

    The model is ``q(α) = -α gᵀd + ½ α² dᵀBd``; at ``α = gᵀd / dᵀBd`` it has decreased by ``(gᵀd)² / (2 dᵀBd)``.

    Args:
        gradient: g.
        direction: d.
        curvature_along: dᵀBd.

    Returns:
        The decrease: 0 where d is no direction of descent, ∞ where it is one along which the model has no minimum.
    """
    slope, bend = float((gradient * direction).sum()), float(curvature_along)
    if not math.isfinite(slope) or not math.isfinite(bend):
        return math.nan
    if slope <= 0:
        return 0.0
    return slope**2 / (2 * bend) if bend > 0 else math.inf


def quadratic_form(matrix: Tensor, direction: Tensor) -> Tensor:
    """dᵀMd, summed over blocks: [G, p, p], [G, p] → a scalar."""
    return torch.einsum("gi,gij,gj->", direction, matrix, direction)


def ratio(numerator: Tensor | float, denominator: Tensor | float) -> float:
    """A quotient; 0 / 0 is 0, as the error of a zero matrix that approximates zero."""
    top, bottom = float(numerator), float(denominator)
    if bottom == 0:
        return 0.0 if top == 0 else math.inf
    return top / bottom
