"""``dh_noise``: not below the rounding error of ∂h̄, whatever the gradient's dtype, and not far above it."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import nn

from kfqn_ext.extensions import KBFGSQuantities, extend

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 40), (2000, 3)), (nn.Linear(3, 40), (50, 30, 3)), (nn.Conv2d(2, 40, 3), (8, 2, 18, 18))],
    ids=["linear", "locations", "convolution"],
)
def test_of_a_gradient_in_low_precision(layer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient's mean before and after it was rounded: each of its numbers is, independently."""
    layer, moments = extend(layer.to(dtype)), KBFGSQuantities("sum")
    moments.loss_scale = 1.0
    h = layer(torch.randn(shape, dtype=dtype))
    exact = torch.randn(h.shape, dtype=torch.float64)
    with backpack(moments):
        layer(torch.randn(shape, dtype=dtype)).backward(exact.to(dtype))
    q = moments[layer]
    channel = 1 if isinstance(layer, nn.Conv2d) else -1
    mean = exact.movedim(channel, 0).flatten(1).mean(1)
    error = (q.dh_bar.double() - mean).square().mean().sqrt()
    assert 3 * error < q.dh_noise.max() < 30 * error


@pytest.mark.parametrize("low", LOW, ids=str)
def test_is_that_of_sums_where_it_is_larger(low: torch.dtype) -> None:
    """16 ε of float32 times the mean of |∂h|, which a million roundings in low precision can't go below."""
    layer, moments = extend(nn.Linear(1, 1).to(low)), KBFGSQuantities("sum")
    moments.loss_scale = 1.0
    x = torch.ones(10**6, 1, dtype=low)
    with backpack(moments):
        layer(x).sum().backward()
    expected = max(16 * torch.finfo(torch.float32).eps, 2 * torch.finfo(low).eps / 1000)
    torch.testing.assert_close(moments[layer].dh_noise, torch.tensor([expected]))
