"""A of a convolution with stride 1, from the correlations of its input instead of from its patches.

The block of A that belongs to the offsets δ and δ + Δ of the kernel is a sum over pixels,

    A[δ, δ + Δ] = Σ_{u ∈ δ + grid} x_u x_{u + Δ}ᵀ,

which depends on δ only through Δ and the range of u. So, for each Δ, the input is cut into boxes that each δ's range
contains whole or not at all: along every dimension a core and single pixels at the border. A box's correlation is a
matrix product for each run of pixels; for a 3×3 layer these are 13 products of J×J a pixel instead of the 81 of its
patches. Zero padding is in no range, and neither it nor any patch is ever written out.
"""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from einops import rearrange
from torch import Tensor


def _segments(
    size: int, locations: int, before: int, k: int, dilation: int, difference: int
) -> list[tuple[int, int, list[int]]]:
    """Cut one dimension where the range of an offset δ begins or ends: (start, stop, the δ that contain it)."""
    shift = difference * dilation
    ranges = {}
    for delta in range(max(0, -difference), min(k, k - difference)):
        start = delta * dilation - before
        ranges[delta] = (max(start, 0, -shift), min(start + locations, size, size - shift))
    cuts = sorted({cut for ends in ranges.values() for cut in ends})
    segments = [
        (start, stop, [delta for delta, (first, last) in ranges.items() if first <= start and stop <= last])
        for start, stop in pairwise(cuts)
    ]
    return [segment for segment in segments if segment[2]]


def correlation_gram(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], groups: int, out: Tensor
) -> None:
    """Compute Σ_n Σ_t a_t a_tᵀ without homogeneous coordinate, for stride 1.

    Args:
        x: Input, [N, G·J, *space].
        kernel: Kernel size.
        dilation: See ``torch.nn``.
        padding: Zeros on both sides of each dimension.
        groups: G.
        out: What it is written to, [G, J·|Δ|, J·|Δ|].
    """
    (num_data, channels, *size), dims = x.shape, len(kernel)
    per_group = channels // groups
    locations = [n + 2 * p - d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)]
    # Pixels first: a run of them along the last dimension is then one matrix. Two transpositions cost less than one.
    channels_last = x.flatten(2).mT.contiguous()
    by_group = channels_last.reshape(num_data, channels_last.shape[1], groups, per_group)
    pixels = by_group.permute(2, 1, 0, 3).reshape(groups, *size, num_data, per_group)
    blocks = x.new_zeros(*kernel, *kernel, groups, per_group, per_group)
    differences = product(*(range(1 - k, k) for k in kernel))
    for difference in (d for d in differences if d >= (0,) * dims):  # A is symmetric
        cut = map(_segments, size, locations, padding, kernel, dilation, difference)
        shift = [i * d for i, d in zip(difference, dilation, strict=True)]
        for box in product(*cut):
            correlation = _correlation(pixels, [range(start, stop) for start, stop, _ in box], shift)
            for delta in product(*(offsets for *_, offsets in box)):
                blocks[(*delta, *(i + d for i, d in zip(delta, difference, strict=True)))].add_(correlation)
    assemble(blocks.reshape(-1, torch.Size(kernel).numel(), *blocks.shape[-3:]), 1, out)


def _correlation(pixels: Tensor, box: Sequence[range], shift: Sequence[int]) -> Tensor:
    """Σ_n Σ_u x_u x_{u + shift}ᵀ over the pixels of a box, one run along the last dimension at a time: [G, J, J]."""
    *lines, run = box
    here, there = (slice(run.start + s, run.stop + s) for s in (0, shift[-1]))
    total = pixels.new_zeros(pixels.shape[0], pixels.shape[-1], pixels.shape[-1])
    for line in product(*lines):
        shifted = (i + s for i, s in zip(line, shift, strict=False))
        at: list[tuple[Any, ...]] = [(slice(None), *line, here), (slice(None), *shifted, there)]
        a, b = (pixels[index].flatten(1, 2) for index in at)
        total.baddbmm_(a.mT, b)
    return total


def assemble(blocks: Tensor, width: int, out: Tensor) -> None:
    """Mirror blocks that are known for δ ≤ δ', and write the offset fastest, as a weight has it.

    Args:
        blocks: [P, P, G, k·J, k·J], for P places of the kernel with k = ``width`` places each.
        width: k.
        out: [G, J·P·k, J·P·k].
    """
    for row in range(len(blocks)):
        blocks[row + 1 :, row] = blocks[row, row + 1 :].mT
    by_offset = rearrange(blocks, "p q g (k j) (l i) -> g j p k i q l", k=width, l=width)
    out.view(by_offset.shape).copy_(by_offset)
