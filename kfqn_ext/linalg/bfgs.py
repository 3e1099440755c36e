"""The BFGS update of an inverse, ``eq_13`` of the paper."""

import torch
from torch import Tensor

from kfqn_ext.linalg.pairs import RESOLUTION, dot, unit_pair


def bfgs_update_(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Update an approximate inverse in place so that it maps y to s.

    With ρ = 1 / sᵀy::

        H⁺ = (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ

    computed as ``H + s wᵀ + w sᵀ`` with ``w = -Hy + ½ (1 + yᵀHy) s`` for the pair rescaled to sᵀy = 1: one product
    with H and one rank-2 update, and no power of ρ to overflow. Where the pair is kept (see
    :func:`kfqn_ext.linalg.pairs.unit_pair`), H⁺y = s and H⁺ is as symmetric and positive definite as H;
    elsewhere H does not change.

    Args:
        H: Symmetric positive definite, [*B, d, d]. Overwritten.
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].

    Returns:
        Which pairs were kept, bool [*B].
    """
    # The largest diagonal entry of a positive definite matrix is within a factor d of its norm, and costs d reads.
    s, y, kept = unit_pair(s, y, H.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True))
    Hy = torch.matmul(H, y.unsqueeze(-1)).squeeze(-1)
    yHy = dot(y, Hy)
    # A negative yᵀHy tells of an H that lost its definiteness. And the term that is added, of norm sᵀs (1 + yᵀHy),
    # must leave the smallest eigenvalue of H above its own rounding error.
    smallest = H.diagonal(dim1=-2, dim2=-1).amin(-1, keepdim=True)
    usable = torch.isfinite(yHy) & (yHy >= 0)
    usable &= RESOLUTION * torch.finfo(H.dtype).eps * dot(s, s) * (1.0 + yHy) < smallest
    s = torch.where(usable, s, 0.0)
    w = torch.where(usable, 0.5 * (1.0 + yHy) * s - Hy, 0.0)
    d = H.shape[-1]
    # Unflattened for `baddbmm_`, which writes the rank-2 term straight into H.
    left = torch.stack((s, w), dim=-1).reshape(-1, d, 2)
    right = torch.stack((w, s), dim=-2).reshape(-1, 2, d)
    H.view(-1, d, d).baddbmm_(left, right)
    return (kept & usable).squeeze(-1)


def bfgs_update(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return the updated inverse and leave ``H`` as it is; otherwise :func:`bfgs_update_`.

    Example:
        >>> import torch
        >>> H = bfgs_update(torch.eye(2), torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        >>> H.tolist()
        [[0.25, 0.0], [0.0, 1.0]]

    Args:
        H: Symmetric positive definite, [*B, d, d].
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].

    Returns:
        H⁺, [*B, d, d].
    """
    H = H.clone(memory_format=torch.contiguous_format)
    bfgs_update_(H, s, y)
    return H
