"""Linear layers: with more than two dimensions of input, the middle ones are locations."""

from typing import cast

import torch
from torch import Tensor, nn

from kfqn_ext.geometry.base import LayerGeometry, register
from kfqn_ext.linalg import few_columns


class LinearGeometry(LayerGeometry):
    """``nn.Linear`` on inputs [N, ..., d]."""

    @classmethod
    def of(cls, module: nn.Module) -> "LinearGeometry":
        """Read the geometry off an ``nn.Linear``."""
        linear = cast(nn.Linear, module)
        has_bias = linear.bias is not None
        return cls(linear.weight.shape[1] + has_bias, linear.weight.shape[0], groups=1, has_bias=has_bias)

    def as_batch(self, x: Tensor) -> Tensor:  # noqa: D102
        return x if x.ndim > 1 else x.unsqueeze(0)

    def mean_patch(self, x: Tensor) -> Tensor:  # noqa: D102
        mean = x.flatten(0, -2).mean(0)
        return torch.cat((mean, mean.new_ones(1))) if self.has_bias else mean

    def gram_product(self, x: Tensor, s: Tensor) -> Tensor:  # noqa: D102
        rows = x.flatten(0, -2)
        if not self.has_bias:
            return few_columns.gram_product(rows, s) / x.shape[0]
        u = s[:-1].T @ rows.T + s[-1:].T
        return torch.cat((u @ rows, u.sum(1, keepdim=True)), dim=1).T / x.shape[0]

    def gram(self, x: Tensor) -> Tensor:  # noqa: D102
        rows = x.flatten(0, -2)
        A = rows.new_empty(self.d_in, self.d_in)
        inner = self.inner
        A[:inner, :inner].addmm_(rows.T, rows, beta=0)  # without a copy of it
        if self.has_bias:
            A[inner, :inner] = A[:inner, inner] = rows.sum(0)
            A[inner, inner] = rows.shape[0]
        return A.div_(x.shape[0])

    def trace(self, x: Tensor, num_locations: int) -> Tensor:  # noqa: D102
        norm: Tensor = torch.linalg.vector_norm(x)  # of all entries at once, which a CPU does fast
        mean = norm.square() / x.shape[0]
        return mean + num_locations if self.has_bias else mean

    def gram_outputs_product(self, g: Tensor, s: Tensor) -> Tensor:  # noqa: D102
        return few_columns.gram_product(g.flatten(0, -2), s)

    def patches(self, x: Tensor) -> Tensor:  # noqa: D102
        a = self.outputs(x)
        return torch.cat((a, a.new_ones(*a.shape[:2], 1)), dim=-1) if self.has_bias else a

    def outputs(self, g: Tensor) -> Tensor:  # noqa: D102
        return g.unsqueeze(1).flatten(1, -2)


register(nn.Linear, LinearGeometry.of)
