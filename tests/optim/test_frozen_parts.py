"""A weight or a bias that is frozen while its layer trains: it drives nothing, whatever momentum it had."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests.cases import assert_close
from tests.optim.family import FAMILY, one_per, rows

F64 = torch.float64
X, Y = torch.randn(16, 4, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
LR, DAMPING, BETA, DECAY = 0.1, 0.7, 0.9, 0.01
ROWS = rows(lambda member: member.takes("momentum", "weight_decay"))
each = pytest.mark.parametrize("name", ROWS)


def started(name: str, steps: int = 3) -> tuple[Any, Any]:
    """A model whose layers have curvature and a momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = FAMILY[name].make(model, lr=LR, damping=DAMPING, momentum=BETA, weight_decay=DECAY)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layer 0 has a gradient but was not measured")
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


def inverses(optimizer: Any, layer: Any) -> tuple[Tensor, Tensor]:
    H_A, H_G = optimizer.inverses(layer.weight).dense()
    return H_G.clone(), H_A.clone()


def learn_no_more(optimizer: Any, name: str, **more: float) -> None:
    for group in optimizer.param_groups:
        group.update({FAMILY[name].T: 1000, "inverse_update_freq": 1000, **more})


@each
def test_a_frozen_bias_takes_no_part_in_the_direction(name: str) -> None:
    """Dense: M = [M_w, 0], and the weight's columns of P = H_G M H_A."""
    model, optimizer = started(name)
    layer = model[0]
    layer.bias.requires_grad_(False)
    M, bias = optimizer.state[layer.weight]["momentum"].clone(), layer.bias.detach().clone()
    assert M[:, 4].any()
    M[:, 4] = 0
    learn_no_more(optimizer, name)  # H is what it is: P can be formed from it before the step
    for _ in range(4):
        W, (H_G, H_A) = layer.weight.detach().clone(), inverses(optimizer, layer)
        step(model, optimizer)
        M[:, :4] = BETA * M[:, :4] + layer.weight.grad
        moved, P = W - LR * DECAY * W - layer.weight.detach(), (H_G @ M @ H_A)[:, :4]
        assert_close(moved, FAMILY[name].rate(LR, moved, P) * P, 1e-12)
        assert torch.equal(layer.bias, bias)
    assert_close(optimizer.state[layer.weight]["momentum"], M, 1e-12)


@pytest.mark.parametrize("name", [name for name in ROWS if FAMILY[name].others_by_momentum])
def test_beside_a_frozen_weight_the_bias_takes_its_momentum(name: str) -> None:
    """Dense: p = m at the rate of others, α/λ or KFAC's α; not the column of H_G M H_A with the weight's M in it."""
    model, optimizer = started(name)
    layer = model[0]
    layer.weight.requires_grad_(False)
    m, weight = optimizer.state[layer.weight]["momentum"][:, 4].clone(), layer.weight.detach().clone()
    rate = optimizer.recipe.others.rate(LR, DAMPING)
    for _ in range(4):
        b = layer.bias.detach().clone()
        step(model, optimizer)
        m = BETA * m + layer.bias.grad
        assert_close(layer.bias.detach(), b - rate * m - LR * DECAY * b, 1e-12)
        assert torch.equal(layer.weight, weight)


def test_a_frozen_weight_is_told_of() -> None:
    model, optimizer = started("KBFGS")
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=f"Layer 0 .*its weight frozen.*moves by {optimizer.recipe.others.title}, "):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


@pytest.mark.parametrize("name", one_per(lambda member: member.recipe.second_pass, ROWS))
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_without_gradients_the_rest_comes_to_rest(name: str, frozen: str) -> None:
    model, optimizer = started(name)
    learn_no_more(optimizer, name, weight_decay=0.0)
    getattr(model[0], frozen).requires_grad_(False)

    def rest() -> None:
        with optimizer.first_pass():
            optimizer.zero_grad()
            (0 * F.cross_entropy(model(X), Y)).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(400):
            rest()
        before = [p.detach().clone() for p in model.parameters()]
        rest()
    # Where the length is set, it falls with the signal, and more slowly: √ρ, with ρ = (0.9 / √0.95)⁴⁰⁰.
    small = 1e-6 * LR if FAMILY[name].sets_length else 1e-15
    assert all((p - q).abs().max() < small for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_bad_batch_after_freezing_changes_nothing(frozen: str) -> None:
    """The part of M that is to go stays until a batch is good."""
    model, optimizer = started("KBFGS")
    getattr(model[0], frozen).requires_grad_(False)
    before = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(Minibatch(model, F.cross_entropy, X * float("nan"), Y))
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[model[0].weight].items())


def test_a_bias_that_trains_again_starts_from_rest() -> None:
    model, optimizer = started("KBFGS")
    model[0].bias.requires_grad_(False)
    step(model, optimizer)
    assert not optimizer.state[model[0].weight]["momentum"][:, 4].any()
    model[0].bias.requires_grad_(True)
    step(model, optimizer)
    assert torch.equal(optimizer.state[model[0].weight]["momentum"][:, 4], model[0].bias.grad)


# ------------------------------------------------------------------ nothing but frozen weights


def with_frozen_weights(build: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = build(model)
    for layer in (model[0], model[3]):
        layer.weight.requires_grad_(False)
    return model, optimizer


@pytest.mark.parametrize("build", [OnePassKBFGS, KBFGS])
@pytest.mark.filterwarnings("ignore:Layer .* has a gradient but was not measured")
def test_where_all_weights_are_frozen_the_rest_moves_as_others_do(build: Any) -> None:
    model, optimizer = with_frozen_weights(build)
    before, losses = {name: p.detach().clone() for name, p in model.named_parameters()}, []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "step.. ran without measurements")
        for _ in range(4):
            optimizer.zero_grad()
            with optimizer.first_pass() if build is KBFGS else nullcontext():
                loss = F.cross_entropy(model(X), Y)
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.bias", "1.weight", "1.bias", "3.bias"}


@pytest.mark.parametrize("build", [OnePassKBFGS, KBFGS])
def test_where_all_is_frozen_there_is_nothing_to_train(build: Any) -> None:
    model, optimizer = with_frozen_weights(build)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="nothing to train: requires_grad is False"):
        optimizer.step()


def test_a_weight_with_a_gradient_that_nobody_measured_is_still_an_error() -> None:
    model, optimizer = with_frozen_weights(KBFGS)
    model.requires_grad_(True)
    F.cross_entropy(model(X), Y).backward()
    with pytest.raises(RuntimeError, match="nothing measured"):
        optimizer.step()
