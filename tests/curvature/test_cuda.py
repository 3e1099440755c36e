"""The same numbers on a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import curvature_ladder, estimate_curvature, exact_block, exact_ggn_block
from kfqn_ext.linalg.operators import Inverses
from tests.curvature.nets import residual

pytestmark = pytest.mark.gpu


def on_both(function: Any, **more: Any) -> tuple[Any, Any]:
    model, x, y = residual(nn.Tanh(), groups=2)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.5, curvature_update_freq=1)
    for _ in range(2):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    results = []
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(model).to(device)
        H_A, H_G = (H.to(device) for H in optimizer.inverses(model.second.weight).dense())
        held: Any = type("Held", (), {"inverses": lambda self, weight, H=(H_A, H_G): Inverses(*H)})()
        arguments = {**more, "optimizers": {"held": held}} if "progress" in more else more
        results.append(function(moved, cross_entropy, x.to(device), y.to(device), "second", **arguments))
    return results[0], results[1]


@pytest.mark.parametrize("form", [exact_block, exact_ggn_block])
def test_blocks(form: Any) -> None:
    cpu, cuda = on_both(form)
    assert cuda.is_cuda
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-8, atol=1e-11)


def test_reports() -> None:
    cpu, cuda = on_both(curvature_ladder, damping=0.5, progress=False)
    for row, other in zip(cpu["second"].rows, cuda["second"].rows, strict=True):
        assert row.rung == other.rung and abs(row.error - other.error) < 1e-6 * (1 + row.error)
        assert abs(row.angle - other.angle) < 1e-3
    _, estimate = on_both(estimate_curvature, damping=0.5, probes=16, progress=False)
    assert 0 < estimate["second", "A ⊗ G"].error < 10


def test_random_numbers_are_left_alone() -> None:
    model, x, y = residual(nn.Tanh())
    model.cuda().train()
    before = torch.cuda.get_rng_state()
    first, second = (exact_block(model, cross_entropy, x.cuda(), y.cuda(), "last") for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, torch.cuda.get_rng_state())
