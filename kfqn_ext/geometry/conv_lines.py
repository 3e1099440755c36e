"""A of a convolution from lines of its input: unfolded along the last dimension, one line at a time.

A line is what has the same coordinates in all dimensions but the last. Its matrix R_r has a column for each channel and
each place that the kernel has along the line, a row for each datum and location there. With δ the kernel's places
across lines,

    A[δ, δ'] = Σ_t R_qᵀ R_r,    q = t·stride + δ·dilation - padding,    r = t·stride + δ'·dilation - padding,

and one product R_qᵀ R_r serves all (t, δ, δ') that meet in these two lines: 27 products of J×J a pixel for a 3×3 layer
instead of the 81 of its patches. As many lines are kept as the kernel spans, and these fit in a CPU's cache.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfqn_ext.geometry.conv_gram import assemble

# At most this many numbers of unfolded lines at a time (64 MiB in float32).
_LINE_BUDGET = 2**24

Line = tuple[int, ...]  # its coordinates
Block = tuple[int, ...]  # (*δ, *δ')
Dimension = tuple[int, int, int, int, int]  # size, kernel, stride, dilation, padding
Meetings = dict[tuple[int, int], list[tuple[int, int]]]


def line_gram(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    groups: int,
    out: Tensor,
) -> None:
    """Compute Σ_n Σ_t a_t a_tᵀ without homogeneous coordinate.

    Args:
        x: Input, [N, G·J, *space].
        kernel: Kernel size.
        stride: See ``torch.nn``.
        dilation: See ``torch.nn``.
        padding: Zeros on both sides of each dimension.
        groups: G.
        out: What it is written to, [G, J·|Δ|, J·|Δ|].
    """
    *across, along = zip(x.shape[2:], kernel, stride, dilation, padding, strict=True)
    *places, width = kernel
    side = width * (x.shape[1] // groups)
    blocks = x.new_zeros(*places, *places, groups, side, side)
    data_at_a_time = max(1, _LINE_BUDGET // (_lines_kept(across) * _locations(*along) * width * x.shape[1]))
    for part in torch.split(x, data_at_a_time):
        _add_products(part, [_meetings(*dimension) for dimension in across], along, groups, blocks)
    assemble(blocks.reshape(-1, torch.Size(places).numel(), groups, side, side), width, out)


def _locations(size: int, kernel: int, stride: int, dilation: int, padding: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _lines_kept(across: Sequence[Dimension]) -> int:
    """How many lines lie between the first and the last place of the kernel."""
    if not across:
        return 1
    (_, kernel, _, dilation, _), *others = across
    return (dilation * (kernel - 1) + 1) * torch.Size([size for size, *_ in others]).numel()


def _meetings(size: int, kernel: int, stride: int, dilation: int, padding: int) -> Meetings:
    """For each pair of coordinates (q, r) along one dimension, the places (δ, δ') that meet them at one location."""
    meetings: Meetings = {}
    for t in range(_locations(size, kernel, stride, dilation, padding)):
        met = [(t * stride + delta * dilation - padding, delta) for delta in range(kernel)]
        inside = [(coordinate, delta) for coordinate, delta in met if 0 <= coordinate < size]
        for (q, first), (r, second) in product(inside, repeat=2):
            meetings.setdefault((q, r), []).append((first, second))
    return meetings


def _add_products(x: Tensor, meetings: Sequence[Meetings], along: Dimension, groups: int, blocks: Tensor) -> None:
    """Add the products with q ≤ r, which are those with δ ≤ δ', to the blocks [*kernel, *kernel, G, k·J, k·J]."""
    pairs: list[tuple[Line, Line]] = [
        (tuple(q for q, _ in ends), tuple(r for _, r in ends)) for ends in product(*meetings)
    ]
    pairs = sorted((pair for pair in pairs if pair[0] <= pair[1]), key=lambda pair: pair[1])
    last_use = {line: i for i, pair in enumerate(pairs) for line in pair}
    lines: dict[Line, Tensor] = {}
    sums: dict[tuple[Block, ...], Tensor] = {}  # far from the border, many pairs of lines are part of the same blocks
    for i, (q, r) in enumerate(pairs):
        for line in (q, r):
            if line not in lines:
                index: tuple[Any, ...] = (..., *line, slice(None))
                lines[line] = _unfolded(x[index], groups, *along)
        members = tuple(_blocks_of(meetings, q, r))
        if members not in sums:
            sums[members] = blocks.new_zeros(blocks.shape[-3:])
        sums[members].baddbmm_(lines[q].mT, lines[r])
        for line in {q, r}:
            if last_use[line] == i:
                del lines[line]
    for members, total in sums.items():
        for block in members:
            blocks[block].add_(total)


def _blocks_of(meetings: Sequence[Meetings], q: Line, r: Line) -> Iterator[Block]:
    """Where a pair of lines meets places of the kernel: (*δ, *δ')."""
    for met in product(*(table[ends] for table, ends in zip(meetings, zip(q, r, strict=True), strict=True))):
        yield (*(first for first, _ in met), *(second for _, second in met))


def _unfolded(line: Tensor, groups: int, size: int, kernel: int, stride: int, dilation: int, padding: int) -> Tensor:
    """R of one line: [N, G·J, size] → [G, N·T, k·J]."""
    padded = F.pad(line, (padding, padding))
    by_group = padded.reshape(len(line), groups, -1, padded.shape[-1])
    # Channels last, so that what is copied next lies in runs of J, and of k·J without dilation.
    pixels = by_group.permute(1, 0, 3, 2).contiguous()
    windows: Tensor = pixels.unfold(2, dilation * (kernel - 1) + 1, stride)[..., ::dilation]  # [G, N, T, J, k]
    return windows.mT.flatten(3).flatten(1, 2)
