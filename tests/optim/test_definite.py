"""What inverses learn pair by pair stays definite in every row: it is looked after every so many lessons."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.preconditioner import guard
from tests.optim.family import FAMILY, rows

LEARNED = rows(lambda member: bool(member.recipe.learned))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(8, 2, 5, 5)
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(8) % 5))


def learned(optimizer: Any) -> list[Tensor]:
    names = optimizer.recipe.learned
    return [state[name] for state in optimizer.state.values() for name in names if name in state]


def are_definite(inverses: list[Tensor]) -> list[bool]:
    return [bool((torch.linalg.eigvalsh(H.double()) > 0).all()) for H in inverses]


def spoil(inverses: list[Tensor]) -> None:
    """Make each negative along one direction, by far more than rounding does, as an early version might have saved."""
    for H in inverses:
        v = torch.randn(H.shape[-1], generator=torch.Generator().manual_seed(0))
        v /= v.norm()
        H -= 2 * torch.linalg.eigvalsh(H).amax(-1)[..., None, None] * v.outer(v)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("name", LEARNED)
def test_an_indefinite_inverse_is_found(name: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next lesson whose number is a multiple of the interval: lessons count, and not steps."""
    monkeypatch.setattr(guard, "interval", lambda d: 4)
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.0, T=T)
    train(model, optimizer, 3 * T)
    spoil(learned(optimizer))
    train(model, optimizer, T - 1)
    assert not any(are_definite(learned(optimizer)))
    train(model, optimizer, 1)
    assert all(are_definite(learned(optimizer)))


def test_an_interval_survives_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "interval", lambda d: 4)
    model = net()
    optimizer, other = (FAMILY["KBFGS"].make(model, lr=0.0) for _ in range(2))
    train(model, optimizer, 3)
    spoil(learned(optimizer))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, other, 1)
    assert all(are_definite(learned(other)))


def test_matrices_are_factored_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an interval that grows with their size, each at its own."""
    sizes: list[list[int]] = []
    monkeypatch.setattr(guard, "make_definite_", lambda H: sizes[-1].append(H.shape[-1]))
    model = nn.Sequential(nn.Linear(79, 70), nn.Tanh(), nn.Linear(70, 5))
    optimizer = FAMILY["KBFGS"].make(model, lr=0.0)
    for _ in range(40):
        sizes.append([])
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(8, 79), torch.arange(8) % 5))
    assert {k: found for k, found in enumerate(sizes, 1) if found} == {
        16: [5],
        18: [70, 71],
        20: [80],
        32: [5],
        36: [70, 71],
        40: [80],
    }
