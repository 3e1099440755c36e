"""The step at rest that ``torch.distributed.checkpoint`` asks for, and steps that only look like it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, rows

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
each = pytest.mark.parametrize("name", FAMILY)
announced = pytest.mark.parametrize("name", rows(lambda member: member.passes == 2))  # one pass measures itself


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module) -> None:
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()


def with_empty_state(name: str) -> tuple[nn.Sequential, Any]:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    assert f"state.0.weight.{FAMILY[name].learned_A}" in get_optimizer_state_dict(model, optimizer, options=options)
    return model, optimizer


@announced
def test_a_warm_up_from_zero_in_a_plain_loop_is_told_what_is_missing(name: str) -> None:
    """Not a step without curvature, at every rate from the second on."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.1)
    LambdaLR(optimizer, lambda k: k / 10)
    backward(model)
    with pytest.raises(RuntimeError, match="nothing measured"):
        optimizer.step()
    assert not optimizer.state and optimizer.param_groups[0]["step"] == 0


@each
def test_a_warm_up_from_zero_in_a_closure_works(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.1)
    schedule, before = LambdaLR(optimizer, lambda k: k / 10), model[0].weight.detach().clone()
    for moved in (False, True):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        schedule.step()
        assert torch.equal(model[0].weight, before) is not moved


@announced
def test_an_empty_state_is_no_curvature(name: str) -> None:
    """A plain loop after it is refused, at any rate; and there is nothing to describe."""
    model, optimizer = with_empty_state(name)
    assert [(d.A, d.G, d.leverage) for d in optimizer.diagnostics()] == [(None, None, None)] * 2
    before = model[0].weight.detach().clone()
    for lr in (0.1, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        backward(model)
        with pytest.raises(RuntimeError, match="nothing measured"):
            optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_warm_start_after_it_counts() -> None:
    model, twin = net(), net()
    optimizer, other = with_empty_state("KBFGS")[1], FAMILY["KBFGS"].make(twin, lr=0.1)
    model = optimizer._model
    for which, of in ((optimizer, model), (other, twin)):
        which.warm_start([X, 2 * X], progress=False)
        which.step(Minibatch(of, F.cross_entropy, X, Y))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_step_without_gradients_is_none() -> None:
    optimizer = KBFGS.as_printed(net(), lr=0.0, damping=1.0)
    with pytest.raises(RuntimeError, match="No parameter has a gradient"):
        optimizer.step()
