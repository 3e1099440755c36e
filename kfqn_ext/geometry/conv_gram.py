"""A of a convolution with stride 1, from the correlations of its input instead of from its patches.

The block of A that belongs to two offsets δ, δ' of the kernel is a sum over the places u = t + δ of the padded input,

    A[δ, δ'] = Σ_{u ∈ δ + grid} x_u x_{u + δ' - δ}ᵀ,

which depends on δ' - δ but for the range of u. So the padded input is cut into regions that each δ's range contains
whole or not at all: along every dimension a core and 2(k - 1) single places at the border. A region's correlations
at all differences are one weight gradient of a convolution; a 3×3 layer needs 15 products of J×J a place (13 would
do, but not in one call) instead of the 81 of its patches, and no patch is ever written out.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Offset = tuple[int, ...]
FilterGrad = Callable[..., Tensor]


def _ranges(k: int, size: int) -> list[tuple[slice, range]]:
    """Regions along one dimension of ``size`` = T + k - 1 places, each with the offsets δ whose range contains it."""
    locations = size - k + 1
    core = [(slice(k - 1, locations), range(k))] if locations >= k else []
    singles = [u for u in range(size) if not core or not k - 1 <= u < locations]
    # δ's range is δ ≤ u < δ + T.
    return core + [(slice(u, u + 1), range(max(0, u - locations + 1), min(k - 1, u) + 1)) for u in singles]


def _regions(kernel: Offset, sizes: Offset) -> Iterator[tuple[tuple[slice, ...], list[Offset]]]:
    """Regions of the padded input, each with the kernel offsets δ whose range contains it."""
    for parts in product(*(_ranges(k, n) for k, n in zip(kernel, sizes, strict=True))):
        yield tuple(part[0] for part in parts), list(product(*(part[1] for part in parts)))


def correlation_gram(x: Tensor, kernel: Offset, groups: int, filter_grad: FilterGrad) -> Tensor:
    """Compute Σ_n Σ_t a_t a_tᵀ without homogeneous coordinate, for stride and dilation 1.

    Args:
        x: Padded input, [N, J, *space].
        kernel: Kernel size.
        groups: G.
        filter_grad: ``torch.nn.grad.conv{1,2,3}d_weight``.

    Returns:
        [G, J/G · |Δ|, J/G · |Δ|].
    """
    channels, per_group = x.shape[1], x.shape[1] // groups
    # Differences δ' - δ: not negative along the first dimension (A is symmetric), all along the others.
    reach = (0, *(k - 1 for k in kernel[1:]))
    extended = F.pad(x, [side for k in reversed(kernel) for side in (k - 1, k - 1)])
    window = (kernel[0], *(2 * k - 1 for k in kernel[1:]))
    sums: dict[Offset, Tensor] = {}
    for region, offsets in _regions(kernel, tuple(x.shape[2:])):
        # Place u of x is place u + k - 1 of `extended`, and the differences start at -reach.
        around = tuple(
            slice(r.start + k - 1 - before, r.stop + 2 * (k - 1))
            for r, k, before in zip(region, kernel, reach, strict=True)
        )
        places, reachable = _crop(x, region), _crop(extended, around)
        correlations = filter_grad(reachable, (channels, per_group, *window), places, groups=groups)
        for offset in offsets:
            sums[offset] = sums[offset] + correlations if offset in sums else correlations
    return _assemble(sums, kernel, groups, per_group)


def _crop(x: Tensor, last: tuple[slice, ...]) -> Tensor:
    """Slice the last dimensions."""
    index: tuple[Any, ...] = (..., *last)
    return x[index]


def _assemble(sums: dict[Offset, Tensor], kernel: Offset, groups: int, per_group: int) -> Tensor:
    """Place the correlations of every kernel offset into A, [G, J/G · |Δ|, J/G · |Δ|]."""
    some = next(iter(sums.values()))
    size = torch.Size(kernel).numel()
    A = some.new_zeros(groups, per_group, size, per_group, *kernel)
    for row, delta in enumerate(product(*(range(k) for k in kernel))):
        correlations = sums[delta].reshape(groups, per_group, per_group, *some.shape[2:])
        # δ' = δ + difference: rows δ'₁ ≥ δ₁ from difference 0 on, along the other dimensions a window of k.
        first = delta[0]
        windows = (slice(k - 1 - d, 2 * k - 1 - d) for k, d in zip(kernel[1:], delta[1:], strict=True))
        differences = (slice(0, kernel[0] - first), *windows)
        target = (slice(None), slice(None), row, slice(None), slice(first, kernel[0]))
        A[target] = _crop(correlations, differences)
    # Reverse of the symmetry used above, for offsets with δ'₁ < δ₁.
    A = A.reshape(groups, per_group, size, per_group, size)
    tail = size // kernel[0]
    for row in range(size):
        start = row // tail * tail
        A[:, :, row, :, :start] = A[:, :, :start, :, row].permute(0, 3, 1, 2)
    return A.reshape(groups, per_group * size, per_group * size)
