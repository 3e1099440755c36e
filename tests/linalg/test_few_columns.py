"""Products with few vectors: right, and nowhere in a step as columns, which costs a CPU several times as much."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfqn_ext import KBFGS, OnePassKBFGS
from kfqn_ext.linalg import few_columns
from kfqn_ext.optim import Minibatch
from tests.cases import assert_close

F64 = torch.float64
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}


@pytest.mark.parametrize("blocks", [(), (3,)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_products(blocks: tuple[int, ...], k: int) -> None:
    M, V = torch.randn(*blocks, 7, 4, dtype=F64), torch.randn(*blocks, 4, k, dtype=F64)
    assert_close(few_columns.product(M, V), M @ V, 1e-14, M.abs() @ V.abs())
    assert_close(few_columns.gram_product(M, V), M.mT @ (M @ V), 1e-14, M.abs().mT @ (M.abs() @ V.abs()))
    for found in (few_columns.product(M, V), few_columns.gram_product(M, V)):
        assert found.mT.is_contiguous()  # a copy of columns side by side would be a launch, and slow again


class ShortRows(TorchDispatchMode):
    """Shapes of products whose many rows have two to nine numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            shape = tuple(result.shape)
            if 2 <= shape[-1] <= 9 and shape[-2] >= 20:
                self.found.append(shape)
        return result


def net() -> nn.Module:
    convolutions = nn.Conv2d(20, 24, 3), nn.ReLU(), nn.Conv2d(24, 48, 3, groups=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(48 * 4, 40), nn.Tanh(), nn.Linear(40, 30))


@pytest.mark.parametrize("make", [OnePassKBFGS, KBFGS])
def test_no_product_of_a_step_that_is_due_has_short_rows(make: Any) -> None:
    model = net()
    optimizer = make(model)
    batch = Minibatch(model, F.cross_entropy, torch.randn(8, 20, 6, 6), torch.arange(8))
    optimizer.step(batch)
    with ShortRows() as rows:
        optimizer.step(batch)
    assert rows.found == []


def test_they_are_noticed() -> None:
    with ShortRows() as rows:
        few: Tensor = torch.randn(30, 30) @ torch.randn(30, 5)
        assert few.shape == (30, 5)
        few_columns.product(torch.randn(30, 30), torch.randn(30, 5))
    assert rows.found == [(30, 5)]
