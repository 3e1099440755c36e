"""A s of a convolution from two matrix products and shifts, instead of a convolution and its weight gradient.

With s_δ the part of s at the kernel's offset δ, and the pixel of offset δ at location t being p(t, δ),

    u_t = a_tᵀ s = Σ_δ Z[δ, p(t, δ)],  Z[δ, p] = x_pᵀ s_δ,      (Σ_t u_t a_t)_δ = Σ_p x_p U[δ, p],  U[δ, p(t, δ)] = u_t:

every pixel meets all |Δ| offsets in one matrix product, whose |Δ| maps are shifted and added; on the way back, pixel p
meets the window of u around it. Where p(t, δ) lies in the zero padding, t is left out. Exact for every stride and
dilation.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

Shift = tuple[tuple[Any, ...], tuple[Any, ...]]


def shifted_product(
    x: Tensor,
    filters: Tensor,
    constant: Tensor,
    locations: Sequence[int],
    offsets: Sequence[range],
    stride: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Compute Σ_n Σ_t a_t u_t and Σ_n Σ_t u_t with u_t = a_tᵀ s, the homogeneous coordinate apart.

    Args:
        x: Input, [N, G·J, *space].
        filters: s without its homogeneous coordinate, [G, J·|Δ|, k].
        constant: That coordinate, [G, k].
        locations: Spatial size of the output.
        offsets: Where the kernel's places lie along each dimension, relative to the pixel t·stride.
        stride: See ``torch.nn``.

    Returns:
        [G, J·|Δ|, k] and [G, k].
    """
    (num_data, channels, *size), (groups, k) = x.shape, constant.shape
    pixels = x.reshape(num_data, groups, channels // groups, torch.Size(size).numel())
    shifts = _shifts(size, locations, offsets, stride)
    rows = rearrange(filters, "g (j delta) k -> g (delta k) j", delta=len(shifts))
    Z = (rows @ pixels).reshape(num_data, groups, len(shifts), k, *size)
    u = constant.reshape(groups, k, *[1] * len(size)).repeat(num_data, 1, 1, *locations)
    for delta, (t, p) in enumerate(shifts):
        u[t].add_(Z[:, :, delta][p])
    del Z  # as large as what comes next
    U = _windows(u, size, offsets, stride).reshape(num_data, groups, len(shifts) * k, -1)
    # In this order: CPUs are slower at the transposed product.
    sums = (U @ pixels.mT).sum(0).reshape(groups, len(shifts), k, -1)
    return rearrange(sums.flip(1), "g delta k j -> g (j delta) k"), u.flatten(3).sum((0, 3))


def _windows(u: Tensor, size: Sequence[int], offsets: Sequence[range], stride: Sequence[int]) -> Tensor:
    """U as a view: [N, G, k, *locations] → [N, G, *kernel, k, *space], the kernel's places backwards.

    With the u_t put down ``stride`` apart, what pixel p meets at the kernel's last place lies at p, and what it
    meets at the others lies behind that in steps of the dilation.
    """
    dims = len(size)
    reach = [places[-1] - places[0] for places in offsets]
    spread = u.new_zeros(*u.shape[:3], *(n + r for n, r in zip(size, reach, strict=True)))
    last = [range(places[-1], places[-1] + 1) for places in offsets]
    [(t, p)] = _shifts(spread.shape[3:], u.shape[3:], last, stride)
    spread[p] = u[t]
    for i, (r, places) in enumerate(zip(reach, offsets, strict=True)):
        spread = spread.unfold(3 + i, r + 1, 1)[..., :: places.step]
    return spread.permute(0, 1, *range(3 + dims, 3 + 2 * dims), 2, *range(3, 3 + dims))


def _shifts(
    size: Sequence[int], locations: Sequence[int], offsets: Sequence[range], stride: Sequence[int]
) -> list[Shift]:
    """Index the last dimensions of maps over locations and over pixels, for each offset of the kernel.

    A pair of indices per offset, the last dimension's offset fastest: slices of equal lengths.
    """
    per_dimension = map(_shifts_along, size, locations, offsets, stride)
    return [
        ((..., *(t for t, _ in parts)), (..., *(pixels for _, pixels in parts))) for parts in product(*per_dimension)
    ]


def _shifts_along(size: int, locations: int, offsets: range, stride: int) -> list[tuple[slice, slice]]:
    """Along one dimension, for each offset: the locations t whose pixel t·stride + offset exists, and those pixels."""
    shifts = []
    for offset in offsets:
        start = max(0, -(offset // stride))
        stop = max(start, min(locations, (size - 1 - offset) // stride + 1))
        first = start * stride + offset
        shifts.append((slice(start, stop), slice(first, first + (stop - start) * stride, stride)))
    return shifts
