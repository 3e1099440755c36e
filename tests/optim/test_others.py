"""Parameters without a block: AdamW's steps, as torch.optim.AdamW takes them."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests.cases import assert_close
from tests.optim.family import FAMILY, Member, rows

F64 = torch.float64
LR, BETA, DECAY = 0.05, 0.7, 0.3
ROWS = rows(lambda member: not member.others_by_momentum)
each = pytest.mark.parametrize("name", ROWS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.GroupNorm(5, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def others(model: nn.Module) -> list[Tensor]:
    return [p for m in model.modules() if not isinstance(m, nn.Linear) for p in m.parameters(recurse=False)]


def batch(model: nn.Module, k: int, factor: float = 1.0) -> Minibatch:
    """Which words a minibatch has changes: gradients of others are zero."""
    x = torch.randint(10, (7,), generator=torch.Generator().manual_seed(k))
    return Minibatch(model, lambda output, y: factor * F.cross_entropy(output, y), x, torch.arange(7) % 3, targets)


def targets(output: Tensor, *unused: Any) -> Tensor:
    return output.detach().argmin(dim=1)


def of_torch(parameters: list[Tensor], member: Member, decay: float) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    """Copies of parameters in torch's optimizer, whose decay counts in its own rate: α γ here is α/10 times 10 γ."""
    twins, ratio = [nn.Parameter(p.detach().clone()) for p in parameters], member.recipe.others.ratio
    return twins, torch.optim.AdamW(twins, lr=ratio * LR, betas=(BETA, 0.999), weight_decay=decay / ratio)


@pytest.mark.parametrize("decay", [0.0, DECAY])
@each
def test_twenty_steps_are_those_of_torch(name: str, decay: float) -> None:
    """Also across minibatches that are not finite, which neither state nor parameters see."""
    model, member = net(), FAMILY[name]
    optimizer = member.make(model, lr=LR, momentum=BETA, weight_decay=decay)
    twins, adamw = of_torch(others(model), member, decay)
    for k in range(20):
        if k in (0, 7, 8):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step(batch(model, k, float("nan" if k == 7 else "inf")))
            continue
        optimizer.step(batch(model, k))
        for p, q in zip(others(model), twins, strict=True):
            q.grad = p.grad.clone()
        adamw.step()
        for p, q in zip(others(model), twins, strict=True):
            assert_close(p.detach(), q.detach(), 1e-12)
            assert_close(optimizer.state[p]["exp_avg_sq"], adamw.state[q]["exp_avg_sq"], 1e-12)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@each
def test_a_gradient_that_is_not_finite_changes_nothing(name: str, value: str) -> None:
    """One entry of one gradient, as an overflow leaves it."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=LR, T=50)
    for k in range(2):
        optimizer.step(batch(model, k))
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in model.parameters()])

    class Spoiled(Minibatch):
        def __call__(self) -> Tensor:
            loss = super().__call__()
            model[1].weight.grad[2] = float(value)
            return loss

    good = batch(model, 3)
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step(Spoiled(model, good.loss_fn, good.x, good.y, targets))
    for p, (q, state) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q) and state.keys() == optimizer.state[p].keys()
        assert all(torch.equal(value, optimizer.state[p][key]) for key, value in state.items())


@pytest.mark.parametrize("steps", [1, 3, 30])
@each
def test_a_bias_beside_a_weight_that_is_frozen_later_takes_no_longer_steps(name: str, steps: int) -> None:
    """Its momentum is older than its second moment. With equal gradients a step of AdamW is its rate."""
    model = nn.Sequential(nn.Linear(3, 4)).double()
    optimizer = FAMILY[name].make(model, lr=LR, T=50)
    x, signs = torch.randn(5, 3, dtype=F64), torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=F64)

    def step() -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            return (output * signs).sum(1).mean()

        optimizer.step(Minibatch(model, loss, x, torch.zeros(5), lambda output, *unused: torch.zeros(5)))

    for _ in range(steps):
        step()
    model[0].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            before = model[0].bias.detach().clone()
            step()
            rate = FAMILY[name].recipe.others.ratio * LR
            moved = (before - model[0].bias.detach()) / rate
            assert (moved * signs > 0).all() and (moved.abs() < 1 + 1e-6).all()


@each
def test_layers_with_curvature_keep_no_second_moment(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=LR)
    for k in range(2):
        optimizer.step(batch(model, k))
    kept = {p for p, state in optimizer.state.items() if "exp_avg_sq" in state}
    assert kept == set(others(model))


@pytest.mark.parametrize(("build", "title"), [(OnePassKBFGS, "AdamW"), (KBFGS.as_printed, "momentum")])
def test_the_table_of_treatments_names_the_rule(build: Any, title: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    rows = {line.split()[0]: line.split()[2] for line in repr(build(model)).splitlines()[3:-1]}
    assert rows["1.weight"] == rows["1.bias"] == title and rows["0.weight"] == "Kronecker"
