"""Who decides a group's value: its schedule, step by step and no further ahead, or whoever has set another one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, burn_in, dense_then
from tests.optim.family import FAMILY, classes

X, Y = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def batch(model: nn.Module) -> Minibatch:
    return Minibatch(model, F.cross_entropy, X, Y)


def rates(k: int) -> float:
    return 0.2 / k


def dampings(k: int) -> float:
    return 0.5 + 0.1 * k


def has(row: str, name: str) -> bool:
    """Whether a row has a value that can be scheduled; what it calls T, every row has."""
    return name == "T" or FAMILY[row].takes(name)


class Counted(Minibatch):
    """Counts its evaluations."""

    passes = 0

    def __call__(self) -> Tensor:
        self.passes += 1
        return super().__call__()


# ------------------------------------------------------------------ the schedule


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, name) for name in ("lr", "damping", "weight_decay", "T") for row in FAMILY if has(row, name)],
)
def test_no_schedule_is_asked_about_a_step_that_is_not_taken(row: str, name: str) -> None:
    """A table of five values serves five steps; the sixth fails before anything has moved."""
    table = [1, 1, 2, 2, 1] if name == "T" else [0.1, 0.1, 0.05, 0.05, 0.01]
    asked: list[int] = []

    def schedule(k: int) -> Any:
        asked.append(k)
        return table[k - 1]

    model = net()
    optimizer = FAMILY[row].make(model, **{"lr": 0.01, name: schedule})
    for k in range(1, 6):
        assert max(asked) <= k
        optimizer.step(batch(model))
    assert max(asked) == 5
    before, state = [p.detach().clone() for p in model.parameters()], optimizer.state_dict()
    with pytest.raises(IndexError):
        optimizer.step(batch(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.state_dict()["param_groups"] == state["param_groups"] and not optimizer.second_pass_due


def test_a_rate_that_ends_at_zero() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, lr=lambda k: 0.1 * (1 - k / 5), damping=1.0)
    for _ in range(5):
        optimizer.step(batch(model))
    with pytest.raises(ValueError, match="learning rate"):
        optimizer.step(batch(model))


# ------------------------------------------------------------------ somebody else


SET_BY_HAND = {"lr": 0.02, "damping": 3.0, "weight_decay": 0.1, "T": 3, "inverse_update_freq": 4}


@pytest.mark.parametrize(("row", "name"), [(row, name) for row in classes() for name in SET_BY_HAND if has(row, name)])
@pytest.mark.parametrize("resume", [False, True])
def test_a_value_that_somebody_else_sets_ends_the_schedule(row: str, name: str, resume: bool) -> None:
    """Of this group and this value alone, for good: also in a run that is resumed."""
    model, member, value = net(), FAMILY[row], SET_BY_HAND[name]
    T1, T2 = (burn_in(3, 1), dense_then(3, 2)) if name in ("T", "inverse_update_freq") else (1, 1)
    options = member.taken(damping=dampings, weight_decay=lambda k: 0.01 * k, inverse_update_freq=T2)
    key = member.T if name == "T" else name

    def build() -> Any:
        groups = [{"params": list(model[i].parameters())} for i in (0, 3)]
        return member.make(model, params=groups, lr=rates, T=T1, **options)

    optimizer = build()
    for _ in range(2):
        optimizer.step(batch(model))
    optimizer.param_groups[1][key] = value
    for k in (3, 4):
        optimizer.step(batch(model))
        if resume:
            saved = optimizer.state_dict()
            optimizer = build()
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[1][key] == value
        assert optimizer.param_groups[0]["lr"] == rates(k)
        if name != "damping" and has(row, "damping"):
            assert optimizer.param_groups[1]["damping"] == dampings(k)
    optimizer.param_groups[1][key] = 2  # by hand again
    optimizer.step(batch(model))
    assert optimizer.param_groups[1][key] == 2


def test_a_value_set_before_the_first_step() -> None:
    """The default T is a schedule; a group's own T is not."""
    model = net()
    optimizer = KBFGS.as_printed(model, lr=0.01, damping=1.0)
    for group in optimizer.param_groups:
        group["curvature_update_freq"] = 3
    due = []
    for k in range(1, 8):
        closure = Counted(model, F.cross_entropy, X, Y)
        optimizer.step(closure)
        due += [k] * (closure.passes == 2)
    assert due == [3, 6] and "curvature_update_freq=3" in repr(optimizer) and "scheduled" not in repr(optimizer)


@pytest.mark.parametrize("lr", [0.4, torch.tensor(0.4)], ids=["number", "tensor"])
def test_torch_schedulers_take_over_from_a_function(lr: Any) -> None:
    """Also where they change a tensor in place."""
    model = net()
    optimizer = KBFGS.as_printed(model, lr=lambda k: lr, damping=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for k in range(4):
        optimizer.step(batch(model))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.4 * 0.5**k)
        scheduler.step()
