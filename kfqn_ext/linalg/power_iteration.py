"""Spectral norms of many matrices that change little from one time to the next: one power iteration each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfqn_ext.linalg.padded import stack, times, unstack


def start_vector(like: Tensor, blocks: Sequence[int] = ()) -> Tensor:
    """A unit vector that is orthogonal to nothing in particular, and the same wherever it is made.

    Args:
        like: [d], for its length, dtype and device.
        blocks: *B.

    Returns:
        [*B, d].
    """
    d = like.shape[-1]
    u = torch.arange(1, d + 1, dtype=torch.float64, device=like.device).mul_(2.618033988749895).sin_()
    u /= torch.linalg.vector_norm(u)
    return u.to(like.dtype).expand(*blocks, d).clone()


def spectral_norms_(matrices: Sequence[Tensor], vectors: Sequence[Tensor], keep: Tensor, iterations: int = 1) -> Tensor:
    """‖P‖₂ of each matrix, from below, and better vectors to begin with next time.

    u ← PᵀPu / ‖PᵀPu‖, and ‖P‖₂ ≈ ‖PᵀPu‖ / ‖Pu‖: two products with a vector. A vector that P maps to zero stays as it
    is, so that it is not lost for the next P.

    Args:
        matrices: L of different sizes, [*B, m_i, n_i].
        vectors: A unit vector u for each, [*B, n_i]. Overwritten.
        keep: Where the vectors are to be left alone, bool [].
        iterations: How many times.

    Returns:
        [L]: of a block diagonal matrix that of the largest block. Zero where P maps u to zero.
    """
    norms = matrices[0].new_zeros(len(matrices))
    for _ in range(iterations):
        norms = _iterate(matrices, vectors, keep)
    return norms


def _iterate(matrices: Sequence[Tensor], vectors: Sequence[Tensor], keep: Tensor) -> Tensor:
    images = [times(P, u) for P, u in zip(matrices, vectors, strict=True)]
    back = stack(times(P.mT, v) for P, v in zip(matrices, images, strict=True))
    after = torch.linalg.vector_norm(back, dim=-1)
    ratios: Tensor = after / torch.linalg.vector_norm(stack(images), dim=-1)
    norms = ratios.nan_to_num(0.0, 0.0)  # 0 / 0 for a vector that P maps to zero
    usable = (norms > 0) & ~keep
    better = torch.where(usable.unsqueeze(-1), back / after.unsqueeze(-1), stack(vectors))
    torch._foreach_copy_(list(vectors), unstack(better, [u.shape[-1] for u in vectors]))
    return norms if norms.ndim == 1 else norms.flatten(1).amax(1)
