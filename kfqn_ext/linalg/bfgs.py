"""The BFGS update of an inverse, ``eq_13`` of the paper."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfqn_ext.linalg.padded import times_each
from kfqn_ext.linalg.pairs import RESOLUTION, dot, unit_pair


def bfgs_update_each_(inverses: Sequence[Tensor], s: Tensor, y: Tensor) -> Tensor:
    """Update approximate inverses of several sizes in place, so that each maps its y to its s.

    With ρ = 1 / sᵀy::

        H⁺ = (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ

    computed as ``H + s wᵀ + w sᵀ`` with ``w = -Hy + ½ (1 + yᵀHy) s`` for the pair rescaled to sᵀy = 1: one product
    with H and one rank-2 update, and no power of ρ to overflow. Where the pair is kept (see
    :func:`kfqn_ext.linalg.pairs.unit_pair`), H⁺y = s and H⁺ is as symmetric and positive definite as H;
    elsewhere H does not change.

    Args:
        inverses: L symmetric positive definite matrices H, [*B, d_i, d_i]. Overwritten.
        s: Steps, [L, *B, d], padded: :func:`kfqn_ext.linalg.padded.stack`.
        y: Changes of the gradients along them, [L, *B, d], padded.

    Returns:
        Which pairs were kept, bool [L, *B].
    """
    extremes = [torch.aminmax(H.diagonal(dim1=-2, dim2=-1), dim=-1, keepdim=True) for H in inverses]
    smallest, largest = (torch.stack(entries) for entries in zip(*extremes, strict=True))
    # The largest diagonal entry of a positive definite matrix is within a factor d of its norm, and costs d reads.
    s, y, kept = unit_pair(s, y, largest)
    Hy = times_each(inverses, y)
    yHy = dot(y, Hy)
    # A negative yᵀHy tells of an H that lost its definiteness. And the term that is added, of norm sᵀs (1 + yᵀHy),
    # must leave the smallest eigenvalue of H above its own rounding error.
    usable = torch.isfinite(yHy) & (yHy >= 0)
    usable &= RESOLUTION * torch.finfo(s.dtype).eps * dot(s, s) * (1.0 + yHy) < smallest
    s = torch.where(usable, s, 0.0)
    w = torch.where(usable, 0.5 * (1.0 + yHy) * s - Hy, 0.0)
    for H, left, right in zip(inverses, torch.stack((s, w), dim=-1), torch.stack((w, s), dim=-2), strict=True):
        d = H.shape[-1]
        # Unflattened for `baddbmm_`, which writes the rank-2 term straight into H.
        H.view(-1, d, d).baddbmm_(left[..., :d, :].reshape(-1, d, 2), right[..., :d].reshape(-1, 2, d))
    return (kept & usable).squeeze(-1)


def bfgs_update_(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Update one approximate inverse in place; see :func:`bfgs_update_each_`.

    Args:
        H: Symmetric positive definite, [*B, d, d]. Overwritten.
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].

    Returns:
        Which pairs were kept, bool [*B].
    """
    return bfgs_update_each_([H], s.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


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
