"""A kind of layer that the package does not know, taught with as little as possible."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.geometry import LayerGeometry, base, register
from tests.cases import Case, case


class Transposed(nn.Module):
    """x @ weight + bias with weight [in, out], as some language models have it."""

    def __init__(self, d_in: int, d_out: int, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(d_out, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        return h if self.bias is None else h + self.bias


class TransposedGeometry(LayerGeometry):
    """The three methods that every kind needs, and the two that say how its weight is laid out."""

    def as_batch(self, x: Tensor) -> Tensor:
        return x if x.ndim > 1 else x.unsqueeze(0)

    def patches(self, x: Tensor) -> Tensor:
        a = self.outputs(x)
        return nn.functional.pad(a, (0, 1), value=1.0) if self.has_bias else a

    def outputs(self, g: Tensor) -> Tensor:
        return g.unsqueeze(1).flatten(1, -2)

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT

    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT


def describe(module: Any) -> TransposedGeometry:
    has_bias = module.bias is not None
    return TransposedGeometry(module.weight.shape[0] + has_bias, module.weight.shape[1], groups=1, has_bias=has_bias)


SHAPES = [(6, 5), (6, 3, 5), (4, 2, 3, 5), (5,)]
TRANSPOSED: list[Case] = [
    case(Transposed, shape, d_in=5, d_out=4, bias=bias) for shape in SHAPES for bias in (True, False)
]


@contextmanager
def taught() -> Iterator[None]:
    """Know the kind in the body."""
    register(Transposed, describe)
    try:
        yield
    finally:
        base._REGISTRY.pop(Transposed)
