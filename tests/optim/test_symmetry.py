"""H_A and H_G of every rule are symmetric to the last bit, also from a state that was saved with less."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY

KEYS = ("H_A", "H_G")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 34, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(34 * 4, 17))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for k in steps:
        x = torch.randn(16, 4, 4, 4, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(16)))


def inverses(optimizer: Any) -> list[Tensor]:
    return [state[key] for state in optimizer.state.values() for key in KEYS if key in state]


@pytest.mark.parametrize("name", FAMILY)
def test_inverses_are_exactly_symmetric(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05)
    train(model, optimizer, range(4))
    assert all(torch.equal(H, H.mT) for H in inverses(optimizer))


@pytest.mark.parametrize("name", [name for name in FAMILY if name.startswith("KBFGS")])
def test_an_asymmetry_is_not_loaded(name: str) -> None:
    """As earlier versions left it; a symmetric state is loaded bit for bit."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for spoil in (False, True):
        for state in saved["state"].values():
            for key in KEYS:
                if spoil and key in state:
                    state[key] += 1e-6 * torch.randn_like(state[key])
        optimizer.load_state_dict(saved)
        assert all(torch.equal(H, H.mT) for H in inverses(optimizer))
        expected = [state[key] for state in saved["state"].values() for key in KEYS if key in state]
        for H, given in zip(inverses(optimizer), expected, strict=True):
            torch.testing.assert_close(H, given, rtol=0, atol=1e-5 if spoil else 0)
