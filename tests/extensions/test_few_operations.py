"""Measuring launches few operations."""

import pytest
import torch
from backpack import backpack
from torch import nn

from kfqn_ext import KBFGSQuantities, extend
from workloads.operations import Operations


def operations(kernel_size: int, stride: int = 1) -> int:
    """Beside those of a forward and backward pass, with A s in one direction."""
    x = torch.randn(2, 16, 9, 9)
    plain = nn.Conv2d(16, 4, kernel_size, stride, padding=kernel_size // 2)
    with Operations() as without:
        plain(x).sum().backward()
    layer = extend(plain)
    with Operations() as measuring, backpack(KBFGSQuantities(probe=lambda module, a_bar: a_bar)):
        layer(x).sum().backward()
    assert torch.isfinite(layer.weight.kbfgs.A_s).all()
    return measuring.number - without.number


@pytest.mark.parametrize("stride", [1, 2])
def test_one_operation_for_each_place_of_the_kernel(stride: int) -> None:
    assert operations(5, stride) - operations(3, stride) == 25 - 9
    assert operations(3, stride) <= 43  # one of them, that keeps the input, is of a single number on the CPU
