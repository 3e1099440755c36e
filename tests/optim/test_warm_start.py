"""What a warm start needs of a data set and of a forward pass, and what it says where that is missing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests.optim.family import FAMILY, rows

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def curvature(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("name", rows(lambda member: member.starts_from_inputs))
def test_a_backward_pass_that_is_not_needed_does_no_harm(name: str) -> None:
    """A loader of inputs makes what a function makes that runs both passes, and it leaves no gradient."""
    models = net(), net()
    plain, both = (FAMILY[name].make(model, lr=0.05) for model in models)
    plain.warm_start([X[:5], X[5:]], progress=False)

    def forward(batch: tuple[Tensor, Tensor]) -> None:
        F.cross_entropy(models[1](batch[0]), batch[1]).backward()

    both.warm_start([(X[:5], Y[:5]), (X[5:], Y[5:])], forward, progress=False)
    assert curvature(plain)
    for one, other in zip(curvature(plain), curvature(both), strict=True):
        assert torch.equal(one, other)
    assert all(p.grad is None for p in models[1].parameters())


@pytest.mark.parametrize("name", rows(lambda member: not member.starts_from_inputs))
def test_the_message_s_example_is_what_works(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05)
    with pytest.raises(ValueError, match="needs gradients") as refused:
        optimizer.warm_start([X], progress=False)
    example = str(refused.value).split("which does: ")[1].removesuffix(".")
    loader = eval(example, {"Minibatch": Minibatch, "model": model, "loss_fn": F.cross_entropy, "loader": [(X, Y)]})
    optimizer.warm_start(loader, progress=False)
    assert curvature(optimizer)


@pytest.mark.parametrize("name", rows(lambda member: member.samples))
def test_each_batch_has_targets_of_its_own(name: str) -> None:
    """Γ of many batches of one datum is near that of all data's distributions, E[diag(p) - p pᵀ]."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(600, 4)
    optimizer = FAMILY[name].make(model, lr=0.05)
    loader = [Minibatch(model, F.cross_entropy, x[i : i + 1], Y[:1]) for i in range(len(x))]
    optimizer.warm_start(loader, progress=False)
    p = model(x).softmax(1).detach()
    exact = torch.diag(p.mean(0)) - p.T @ p / len(x)
    assert (optimizer.state[model.weight]["Gamma"] - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("start", [False, True], ids=["new", "trained"])
def test_a_forward_pass_that_shows_no_layer(name: str, start: bool) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05)
    if start:
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    before = [value.clone() for value in curvature(optimizer)]
    with pytest.raises(ValueError, match="no layer was measured"):
        optimizer.warm_start([X], lambda batch: None, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, curvature(optimizer), strict=True))


class Energy(nn.Module):
    """A model that differentiates within its forward pass, whatever is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.body(x).sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


@pytest.mark.parametrize("make", [KBFGS.as_printed, OnePassKBFGS])
def test_a_model_that_turns_gradients_on(make: Any) -> None:
    model, twin = Energy(), net()
    optimizer, other = make(model), make(twin)
    optimizer.warm_start([X], progress=False)
    other.warm_start([X], progress=False)
    assert all(torch.equal(a, b) for a, b in zip(curvature(optimizer), curvature(other), strict=True))
    assert not any(value.requires_grad for value in curvature(optimizer))
