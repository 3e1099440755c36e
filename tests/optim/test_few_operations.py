"""A step that is not due launches few operations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfqn_ext.optim import KBFGS, Minibatch
from tests.operations import Operations


def operations(blocks: int, **options: Any) -> int:
    """Of one step that is not due, forward and backward pass not counted."""
    torch.manual_seed(0)
    body = [layer for _ in range(blocks) for layer in (nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2))]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 3))
    optimizer = KBFGS(model, lr=0.05, damping=0.5, curvature_update_freq=20, **options)
    batch = Minibatch(model, F.cross_entropy, torch.randn(6, 2, 4, 4), torch.arange(6) % 3)
    optimizer.step(batch)
    with optimizer.first_pass():
        batch()
    with Operations() as operations:
        optimizer.step()
    return operations.number


@pytest.mark.parametrize(
    ("options", "per_block"),
    [
        # Each of the three gradients is cleared, each parameter steps, and there are two products.
        ({}, 8),
        ({"weight_decay": 1e-3}, 11),  # and the decay of each
        ({"direction_dtype": torch.bfloat16}, 10),  # and two casts of the direction
    ],
)
def test_operations_of_a_convolution_and_its_normalization(options: dict[str, Any], per_block: int) -> None:
    few, many = operations(2, **options), operations(12, **options)
    assert many - few == 10 * per_block
    assert few - 2 * per_block < 40  # the rest does not grow with the net
