"""Parts that networks of several problems are made of."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention whose projections are linear layers of their own."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Residual(nn.Module):
    """x + f(normalized x)."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Swapped(nn.Module):
    """A network along the last dimension but one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Positions(nn.Module):
    """Adds a learned vector to each place of a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def transformer_block(width: int, heads: int, causal: bool) -> nn.Sequential:
    """Attention and an MLP, both residual, normalized before."""
    return nn.Sequential(Residual(width, Attention(width, heads, causal)), Residual(width, mlp(width, 4 * width)))


def patches(x: Tensor, size: int) -> Tensor:
    """Square patches of an image as a sequence: [N, places, pixels]."""
    return F.unfold(x, size, stride=size).transpose(1, 2)
