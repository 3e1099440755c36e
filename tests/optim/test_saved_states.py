"""States that an earlier version saved are loaded, and training goes on as it would have there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KroneckerOptimizer, Minibatch
from tests.cases import assert_close
from tests.optim.family import FAMILY

# Written by version 0.1.0 before its rules were renamed: four steps, the state dictionaries, four more steps.
LAYOUT_1 = torch.load(Path(__file__).parent / "saved" / "layout_1.pt", weights_only=True)
NAMES = {name: {"limited H_A": "L-BFGS for H_A"}.get(name, name) for name in LAYOUT_1}  # the registry's


def make(name: str, model: nn.Module) -> KroneckerOptimizer:
    member = FAMILY[NAMES[name]]
    if member.samples:
        return member.make(model, lr=0.1, damping=0.5, T=lambda k: 1 + k % 2)
    return member.with_memory(2).make(model, lr=0.1, damping=1.0 if member.given_damping else 0.5)


def second_best(output: Tensor, *unused: Any) -> Tensor:
    return output.topk(2, dim=1).indices[:, 1]


@pytest.mark.parametrize("name", LAYOUT_1)
def test_layout_1(name: str) -> None:
    saved = LAYOUT_1[name]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = make(name, model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for k in range(4, 8):
        x = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(6) % 3, second_best))
    for key, value in model.state_dict().items():
        assert_close(value, saved["after"][key], 1e-10)


def test_none_of_them_has_been_lost() -> None:
    assert len(LAYOUT_1) == 8 and set(NAMES.values()) <= FAMILY.keys()
