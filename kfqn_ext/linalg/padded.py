"""Vectors of many layers in one tensor, so that an operation on all of them is one operation.

Shorter vectors end with zeros, which change no inner product and no largest entry. Layers with blocks, [*B, d], stand
together only with their equals.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def stack(vectors: Iterable[Tensor]) -> Tensor:
    """Stand vectors of different lengths side by side.

    Args:
        vectors: L of them, each [d_i], or each [*B, d] of the same shape; or matrices [d_i, k] likewise.

    Returns:
        [L, *B, d], where d is the largest of the lengths and shorter ones end with zeros; or [L, *B, d, k].
    """
    vectors = list(vectors)
    if len({v.shape for v in vectors}) == 1:  # in one operation
        return torch.stack(vectors)
    return pad_sequence(vectors, batch_first=True)


def unstack(stacked: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Undo :func:`stack`, by views: [L, *B, d] and L lengths → L times [*B, d_i]."""
    longest = stacked.shape[-1]
    return [v if d == longest else v[..., :d] for v, d in zip(stacked.unbind(), sizes, strict=True)]


def times(H: Tensor, v: Tensor) -> Tensor:
    """Multiply a matrix with a vector: [*B, m, n], [*B, n] → [*B, m]."""
    return torch.mv(H, v) if H.ndim == 2 else (H @ v.unsqueeze(-1)).squeeze(-1)


def times_each(matrices: Sequence[Tensor], v: Tensor) -> Tensor:
    """Multiply each matrix with its vector: L times [*B, d_i, d_i], and [L, *B, d] → [L, *B, d]."""
    vectors = unstack(v, [H.shape[-1] for H in matrices])
    return stack(times(H, u) for H, u in zip(matrices, vectors, strict=True))
