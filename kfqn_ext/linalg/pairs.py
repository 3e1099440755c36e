"""What makes a secant pair (s, y) usable.

Every update of a quasi-Newton matrix goes through ``unit_pair``: it rescales a pair so that sᵀy = 1, or empties
it. An empty pair changes nothing, so no caller ever branches on a tensor and no update waits for the device.
"""

import torch
from torch import Tensor

# sᵀy is a sum whose rounding error is about ε‖s‖‖y‖; a pair counts only where sᵀy is known to two digits.
_SIGNIFICANCE = 100.0
# H⁺ has an eigenvalue near sᵀy / yᵀy. Under ε‖H‖ the rounding of H itself could make it negative.
RESOLUTION = 10.0


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension, which is kept: [*B, d], [*B, d] → [*B, 1]."""
    product: Tensor = torch.linalg.vecdot(a, b)
    return product.unsqueeze(-1)


def common_scale(s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Divide both vectors of a pair by one positive number, so that no product of them over- or underflows.

    BFGS, L-BFGS and every damping here map (c·s, c·y) to c times their result, so the scale is free.
    A pair of zeros stays as it is.
    """
    size = torch.maximum(s.abs().amax(-1, keepdim=True), y.abs().amax(-1, keepdim=True))
    size = torch.where(size > 0, size, 1.0)
    return s / size, y / size


def unit_pair(s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale a pair to sᵀy = 1, or empty it.

    A pair is kept where it is finite, and where its curvature sᵀy is positive beyond the rounding error of the product.

    Args:
        s: Steps, [*B, d].
        y: Changes of the gradient along them, [*B, d].

    Returns:
        ``(s, y, kept)`` with shapes [*B, d], [*B, d] and [*B, 1]; s = y = 0 where ``kept`` is false.
    """
    precision = torch.finfo(s.dtype)
    s, y = common_scale(s, y)
    sy, ss, yy = dot(s, y), dot(s, s), dot(y, y)
    kept = sy > _SIGNIFICANCE * precision.eps * ss.sqrt() * yy.sqrt()
    # A pair of length 1 whose curvature is below the smallest normal number has no usable 1 / sᵀy.
    kept &= (sy > precision.tiny) & torch.isfinite(ss + yy)
    rho = torch.where(kept, sy, 1.0).rsqrt()
    # Not a product with `kept`: 0 · NaN is NaN.
    return torch.where(kept, s * rho, 0.0), torch.where(kept, y * rho, 0.0), kept


def unit_pair_beside(s: Tensor, y: Tensor, size_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, but keep a pair only where the curvature yᵀy / sᵀy that it brings can be told from zero beside H.

    Args:
        s: Steps, [*B, d].
        y: Changes of the gradient along them, [*B, d].
        size_H: A lower bound on the spectral norm of the matrix to be updated, [*B, 1].
    """
    s, y, kept = unit_pair(s, y)
    kept = kept & (RESOLUTION * torch.finfo(s.dtype).eps * dot(y, size_H * y) < 1)
    return torch.where(kept, s, 0.0), torch.where(kept, y, 0.0), kept


def overlong(s: Tensor, most: Tensor) -> Tensor:
    """τ ≥ 1 such that ‖s‖² / τ is at most ``most``, [*B, 1]: of a pair with sᵀy = 1 remain (s/√τ, y√τ).

    Args:
        s: Steps, [*B, d].
        most: [*B, 1], positive.
    """
    return (dot(s, s) / most).clamp(min=1.0)
