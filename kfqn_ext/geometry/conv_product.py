"""A s of a convolution from two matrix products and shifts, instead of a convolution and its weight gradient.

With s_δ the part of s at the kernel's offset δ, and the pixel of offset δ at location t being p(t, δ),

    u_t = a_tᵀ s = Σ_δ Z[δ, p(t, δ)],  Z[δ, p] = x_pᵀ s_δ,      (Σ_t u_t a_t)_δ = Σ_p x_p U[δ, p],  U[δ, p(t, δ)] = u_t:

every pixel meets all |Δ| offsets in one matrix product, whose |Δ| maps are shifted and added, and the way back is the
transpose of that. Where p(t, δ) lies in the zero padding, t is left out. Exact for every stride and dilation.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

Shift = tuple[tuple[Any, ...], tuple[Any, ...]]


def _shifts(size: int, locations: int, offsets: Sequence[int], stride: int) -> list[tuple[slice, slice]]:
    """Along one dimension, for each offset: the locations t whose pixel t·stride + offset exists, and those pixels."""
    shifts = []
    for offset in offsets:
        start = max(0, -(offset // stride))
        stop = max(start, min(locations, (size - 1 - offset) // stride + 1))
        first = start * stride + offset
        shifts.append((slice(start, stop), slice(first, first + (stop - start) * stride, stride)))
    return shifts


def kernel_shifts(
    size: Sequence[int], locations: Sequence[int], offsets: Sequence[Sequence[int]], stride: Sequence[int]
) -> list[Shift]:
    """Index the last dimensions of maps over locations and over pixels, for each offset of the kernel.

    Args:
        size: Spatial size of the input, as the other arguments one entry a dimension.
        locations: Spatial size of the output.
        offsets: Where the kernel's places lie, relative to the pixel t·stride.
        stride: See ``torch.nn``.

    Returns:
        A pair of indices per offset, the last dimension's offset fastest: slices of equal lengths.
    """
    per_dimension = map(_shifts, size, locations, offsets, stride)
    return [
        ((..., *(t for t, _ in parts)), (..., *(pixels for _, pixels in parts))) for parts in product(*per_dimension)
    ]


def shifted_product(
    x: Tensor, filters: Tensor, constant: Tensor, locations: Sequence[int], shifts: Sequence[Shift]
) -> tuple[Tensor, Tensor]:
    """Compute Σ_n Σ_t a_t u_t and Σ_n Σ_t u_t with u_t = a_tᵀ s, the homogeneous coordinate apart.

    Args:
        x: Input, [N, G·J, *space].
        filters: s without its homogeneous coordinate, [G, J·|Δ|, k].
        constant: That coordinate, [G, k].
        locations: Spatial size of the output.
        shifts: From :func:`kernel_shifts`.

    Returns:
        [G, J·|Δ|, k] and [G, k].
    """
    (num_data, channels, *size), (groups, k) = x.shape, constant.shape
    pixels = x.reshape(num_data, groups, channels // groups, torch.Size(size).numel())
    rows = rearrange(filters, "g (j delta) k -> g (delta k) j", delta=len(shifts))
    Z = (rows @ pixels).reshape(num_data, groups, len(shifts), k, *size)
    u = constant.reshape(groups, k, *[1] * len(size)).repeat(num_data, 1, 1, *locations)
    for delta, (t, p) in enumerate(shifts):
        u[t] += Z[:, :, delta][p]
    U = Z.zero_()  # not needed any more, and memory at hand is faster than new memory
    for delta, (t, p) in enumerate(shifts):
        U[:, :, delta][p] = u[t]
    sums = (pixels @ U.flatten(4).flatten(2, 3).mT).sum(0)
    return sums.reshape(groups, -1, k), u.flatten(3).sum((0, 3))
