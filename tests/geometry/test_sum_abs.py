"""Sums of absolute values, as a CPU and as a GPU computes them."""

import pytest
import torch

from kfqn_ext.geometry import sum_abs
from tests.cases import assert_close


@pytest.mark.parametrize("shape", [(3, 2), (7, 3, 4), (600, 2, 9, 50), (0, 3, 2)], ids=str)
def test_both_ways(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape, dtype=torch.float64)
    dims = (0, *range(2, g.ndim))
    explicit = g.movedim(1, 0).flatten(1).abs().sum(1)
    assert_close(sum_abs.sum_abs(g, dims), explicit, 1e-13)
    assert_close(sum_abs._in_one_operation(g, dims), explicit, 1e-13)
