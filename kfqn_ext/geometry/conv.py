"""Convolutions in one, two and three dimensions, never unfolded.

Two facts carry the file. The inner products ``a_tᵀ s`` at all locations are a convolution with the one filter s, and
``Σ_t u_t a_t`` is the gradient of that filter when u is the gradient of its output. Both are exact for every
stride, dilation, padding and group count, because they are the layer's own arithmetic. With many channels, matrix
products do the same for less on a CPU (``conv_product``), and form A (``conv_gram``, ``conv_lines``). These are many
small operations. Where each is a launch, A s stays a convolution, and A comes from patches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn import grad as conv_grad

from kfqn_ext.geometry.base import LayerGeometry, register
from kfqn_ext.geometry.conv_gram import correlation_gram
from kfqn_ext.geometry.conv_lines import line_gram
from kfqn_ext.geometry.conv_product import shifted_product
from kfqn_ext.linalg import few_columns

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_WEIGHT_GRAD: dict[int, Callable[..., Tensor]] = {
    1: conv_grad.conv1d_weight,
    2: conv_grad.conv2d_weight,
    3: conv_grad.conv3d_weight,
}
# A needs no care where its patches fit in a CPU's cache (2 MiB in float32): the other ways take more calls.
_FEW_NUMBERS = 2**19
# At most this many numbers of patches at a time where they are written out for few launches (256 MiB in float32).
_PATCH_BUDGET = 2**26


# Of so few outputs a group, all products with each other cost less than products with a vector.
_FEW_OUTPUTS = 16


def launches_count(x: Tensor) -> bool:
    """Whether many small operations cost more than they save: on every device but a CPU, each is a launch."""
    return x.device.type != "cpu"


@dataclass(frozen=True)
class ConvGeometry(LayerGeometry):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``.

    Attributes:
        kernel_size: Per spatial dimension, as the other attributes.
        stride: See ``torch.nn``.
        dilation: See ``torch.nn``.
        padding: (before, after) per spatial dimension.
        padding_mode: "zeros", "circular", "reflect" or "replicate".
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    padding_mode: str

    @classmethod
    def of(cls, module: nn.Module) -> "ConvGeometry":
        """Read the geometry off a convolution."""
        conv = cast(nn.Conv2d, module)  # the three kinds share these attributes
        has_bias, dims = conv.bias is not None, len(conv.kernel_size)
        return cls(
            d_in=math.prod(conv.weight.shape[1:]) + has_bias,
            d_out=conv.out_channels // conv.groups,
            groups=conv.groups,
            has_bias=has_bias,
            kernel_size=conv.kernel_size,
            stride=_each(conv.stride, dims),
            dilation=_each(conv.dilation, dims),
            padding=_sides(conv),
            padding_mode=conv.padding_mode,
        )

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel_size)

    @property
    def _per_group(self) -> int:
        """J: input channels of one group."""
        return self.inner // torch.Size(self.kernel_size).numel()

    def as_batch(self, x: Tensor) -> Tensor:  # noqa: D102
        return x if x.ndim > self.dims + 1 else x.unsqueeze(0)

    def num_locations(self, g: Tensor) -> int:  # noqa: D102
        return g.shape[2:].numel()

    def pad(self, x: Tensor) -> Tensor:
        """Write the padding out; every product below then runs on an unpadded convolution."""
        if not any(before or after for before, after in self.padding):
            return x
        sides = [side for pair in reversed(self.padding) for side in pair]
        return F.pad(x, sides, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)

    def _prepare(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Leave zero padding to the convolution where it can express it (equal on both sides)."""
        if self.padding_mode == "zeros" and all(before == after for before, after in self.padding):
            return x, tuple(before for before, _ in self.padding)
        return self.pad(x), (0,) * self.dims

    def _filter_grad(self, x: Tensor, padding: tuple[int, ...], u: Tensor) -> Tensor:
        """Σ_n Σ_t u_t a_t without the homogeneous coordinate: u [N, G·k, *T] → [G·k, J/G, *kernel]."""
        shape = (u.shape[1], x.shape[1] // self.groups, *self.kernel_size)
        return _WEIGHT_GRAD[self.dims](x, shape, u, self.stride, padding, self.dilation, self.groups)

    def _block_view(self, flat: Tensor) -> Tensor:
        """[G, ...] → [*B, ...]."""
        return flat if self.groups > 1 else flat.squeeze(0)

    def _locations(self, x: Tensor, padding: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial size of the output."""
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(x.shape[2:], padding, self.dilation, self.kernel_size, self.stride, strict=True)
        )

    def mean_patch(self, x: Tensor) -> Tensor:  # noqa: D102
        mean, padding = self._prepare(x.mean(0, keepdim=True))
        size = self._locations(mean, padding)
        u = mean.new_full((1, self.groups, *size), 1.0 / torch.Size(size).numel())
        a_bar = self._filter_grad(mean, padding, u).reshape(self.groups, -1)
        if self.has_bias:
            a_bar = torch.cat((a_bar, a_bar.new_ones(self.groups, 1)), dim=-1)
        return self._block_view(a_bar)

    def gram_product(self, x: Tensor, s: Tensor) -> Tensor:  # noqa: D102
        num_data, inner, k = x.shape[0], self.inner, s.shape[-1]
        on_cpu = not launches_count(x)
        if on_cpu and self._gram_pays(k):
            return few_columns.product(self.gram(x), s)
        x, padding = self._prepare(x)
        s = s.reshape(self.groups, self.d_in, -1)
        constant = s[:, inner] if self.has_bias else torch.zeros_like(s[:, 0])
        product = self._shifted_product if on_cpu and self._shifts_pay(k) else self._convolved_product
        As, sum_u = product(x, padding, s[:, :inner], constant)
        if self.has_bias:
            As = torch.cat((As, sum_u.unsqueeze(1)), dim=1)
        return self._block_view(As) / num_data

    def _shifts_pay(self, k: int) -> bool:
        """Whether A s with k columns costs less by shifts, whose maps have k |Δ| numbers a pixel where a group has J.

        Measured on a CPU (``python -m benchmarks.ways``): 2 to 5 times less where k |Δ| < J, alike near 3 J, and
        several times more for few channels.
        """
        return k * torch.Size(self.kernel_size).numel() <= 3 * self._per_group

    def _gram_pays(self, k: int) -> bool:
        """Whether A s with k columns costs less from A itself: in small groups, where convolutions are slow on a CPU.

        With one column of a depthwise layer A gains nothing.
        """
        in_small_groups = self.groups > 1 and self._per_group <= 16
        return in_small_groups and self._per_group * k > 1 and not self._shifts_pay(k)

    def _shifted_product(
        self, x: Tensor, padding: tuple[int, ...], filters: Tensor, constant: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ_n Σ_t a_t u_t and Σ_n Σ_t u_t, u_t = a_tᵀ s, from matrix products."""
        steps = zip(padding, self.dilation, self.kernel_size, strict=True)
        offsets = [range(-p, d * k - p, d) for p, d, k in steps]
        return shifted_product(x, filters, constant, self._locations(x, padding), offsets, self.stride)

    def _convolved_product(
        self, x: Tensor, padding: tuple[int, ...], filters: Tensor, constant: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same from a convolution with the filters and its weight gradient."""
        k = filters.shape[-1]
        # One filter per group and column of s, column fastest: the order that `groups` expects.
        kernels = rearrange(filters, "g d k -> (g k) d").reshape(self.groups * k, -1, *self.kernel_size)
        u = _CONV[self.dims](x, kernels, constant.flatten(), self.stride, padding, self.dilation, self.groups)
        sums = self._filter_grad(x, padding, u).flatten(1)
        return rearrange(sums, "(g k) d -> g d k", k=k), u.sum((0, *range(2, u.ndim))).reshape(-1, k)

    def gram(self, x: Tensor) -> Tensor:  # noqa: D102
        num_data, inner = x.shape[0], self.inner
        padded, padding = self._prepare(x)
        num_locations = torch.Size(self._locations(padded, padding)).numel()
        numbers = num_data * num_locations * self.groups * self.d_in
        if numbers <= _FEW_NUMBERS:
            return super().gram(x)
        if launches_count(x):
            return self._gram_of_patches(x, max(1, num_data * _PATCH_BUDGET // numbers))
        A = x.new_empty(self.groups, self.d_in, self.d_in)
        block = A[:, :inner, :inner]
        if self._correlations_pay():
            correlation_gram(padded, self.kernel_size, self.dilation, padding, self.groups, out=block)
        else:
            line_gram(padded, self.kernel_size, self.stride, self.dilation, padding, self.groups, out=block)
        if self.has_bias:
            A[:, inner] = A[:, :, inner] = num_data * num_locations * self.mean_patch(x).reshape(self.groups, -1)
        return self._block_view(A.div_(num_data))

    def _gram_of_patches(self, x: Tensor, at_a_time: int) -> Tensor:
        """A from patches of so many data at a time."""
        A = x.new_zeros(*self.blocks, self.d_in, self.d_in)
        for part in torch.split(x, at_a_time):
            A.add_(super().gram(part), alpha=len(part) / len(x))
        return A

    def _correlations_pay(self) -> bool:
        """Whether A costs less by correlations, which are fewer but smaller products than those of lines.

        On a CPU they are alike at 64 channels a group and a 3×3 kernel (``python -m benchmarks.ways``).
        """
        large = self._per_group * self.kernel_size[-1] > 192
        return large and max(self.kernel_size) > 1 and set(self.stride) == {1}

    def sum_outputs(self, g: Tensor) -> Tensor:  # noqa: D102
        # Not over all dimensions at once, which torch does at up to half the speed.
        return g.flatten(2).sum(2).sum(0).reshape(*self.blocks, self.d_out)

    def bound_sum_abs(self, g: Tensor) -> Tensor:  # noqa: D102
        # √|T| ‖g_n‖ ≥ Σ_t |g_nt|, in one pass over memory where it is contiguous: no absolute values are formed.
        maps = g.flatten(2)
        norms = torch.linalg.vector_norm(maps, dim=2) if g.is_contiguous() else maps.square().sum(2).sqrt()
        return norms.sum(0).reshape(*self.blocks, self.d_out) * math.sqrt(maps.shape[2])

    def gram_outputs(self, g: Tensor) -> Tensor:  # noqa: D102
        maps = g.reshape(len(g), self.groups, self.d_out, -1)
        if maps.shape[-1] >= self.d_out:  # a product a datum is no larger than its maps, and these are not copied
            return self._block_view((maps @ maps.mT).sum(0))
        columns = maps.permute(1, 2, 0, 3).flatten(2)
        return self._block_view(columns @ columns.mT)

    def gram_outputs_product(self, g: Tensor, s: Tensor) -> Tensor:  # noqa: D102
        if self.d_out <= _FEW_OUTPUTS:
            return few_columns.product(self.gram_outputs(g), s)
        maps, s = g.reshape(len(g), self.groups, self.d_out, -1), s.reshape(self.groups, self.d_out, -1)
        return self._block_view(few_columns.gram_product(maps.mT, s).sum(0))

    def patches(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.pad(x)
        for i, (k, stride, dilation) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + i, dilation * (k - 1) + 1, stride)[..., ::dilation]
        t = " ".join(f"t{i}" for i in range(self.dims))
        delta = " ".join(f"k{i}" for i in range(self.dims))
        a = rearrange(x, f"n (g j) {t} {delta} -> n ({t}) g (j {delta})", g=self.groups)
        if self.has_bias:
            a = torch.cat((a, a.new_ones(*a.shape[:-1], 1)), dim=-1)
        return a if self.groups > 1 else a.squeeze(2)

    def outputs(self, g: Tensor) -> Tensor:  # noqa: D102
        h = rearrange(g.flatten(2), "n (g i) t -> n t g i", g=self.groups)
        return h if self.groups > 1 else h.squeeze(2)


def _sides(conv: nn.Conv2d) -> tuple[tuple[int, int], ...]:
    """Padding before and after each spatial dimension; 'same' puts the odd one after."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        dilation = _each(conv.dilation, len(conv.kernel_size))
        totals = [d * (k - 1) for d, k in zip(dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in _each(conv.padding, len(conv.kernel_size)))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """A number for each dimension; ``conv.stride = 2`` after construction is one for all, as torch takes it."""
    return (value,) * dims if isinstance(value, int) else tuple(value)


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_kind, ConvGeometry.of, methods=("forward", "_conv_forward"))
