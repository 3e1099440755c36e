"""The second pass leaves nothing behind: buffers, gradients of a loss with parameters, verdicts on the minibatch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch
from kfqn_ext.optim.passes.snapshot import left_as_it_was
from tests.optim.family import FAMILY, rows

COMMON: dict[str, Any] = {"lr": 0.05, "damping": 1.0}
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
each = pytest.mark.parametrize("name", FAMILY)


class Counting(nn.Module):
    """Counts its calls in every way that a buffer can be written to."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("in_place", "replaced", "data"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("made", None)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.data.data = self.data + 1
        self.made = torch.ones(()) if self.made is None else self.made + 1
        return self.last(torch.tanh(self.first(x)))

    def counts(self) -> list[float]:
        return [float(b) for b in (self.in_place, self.replaced, self.data, self.made)]


@each
def test_a_minibatch_counts_once(name: str) -> None:
    model = Counting()
    optimizer = FAMILY[name].make(model, **COMMON)
    for k in range(1, 4):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        assert model.counts() == [k] * 4


@each
def test_a_warm_start_counts_nothing(name: str) -> None:
    """Nor does it touch gradients, random numbers or parameters."""
    model = Counting()
    optimizer = FAMILY[name].make(model, **COMMON)
    F.cross_entropy(model(X), Y).backward()
    slots, grads = [model.in_place, model.replaced, model.data, model.made], [p.grad for p in model.parameters()]
    values, numbers = [g.clone() for g in grads if g is not None], torch.get_rng_state()

    def forward(batch: Tensor) -> None:
        model.zero_grad()
        minibatch = Minibatch(model, F.cross_entropy, batch, Y)
        if FAMILY[name].samples:
            minibatch.sampled(0)
        else:
            model(batch) if FAMILY[name].starts_from_inputs else minibatch()

    optimizer.warm_start([X, X], forward=forward, progress=False)
    assert [id(b) for b in model.buffers()] == [id(b) for b in slots] and model.counts() == [1] * 4
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(p.grad, v) for p, v in zip(model.parameters(), values, strict=True) if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_after_an_error_too() -> None:
    model = Counting()
    model.in_place.fill_(7)
    with pytest.raises(KeyError), left_as_it_was(model):
        model(X)
        raise KeyError
    assert model.in_place == 7 and model.replaced == 0 and model.made is None


class Temperature(nn.Module):
    """A loss with a parameter and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return F.cross_entropy(output * self.t, y)


@each
def test_a_loss_with_parameters_gets_the_gradient_of_the_first_pass(name: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 3), Temperature()
    optimizer = FAMILY[name].make(model, lr=0.0)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(X) * loss_fn.t, Y), loss_fn.t)
    batch = Minibatch(model, loss_fn, X, Y, sample_targets=lambda output, y, generator: output.argmax(1))
    for k in (1, 2):
        optimizer.step(batch)
        assert torch.equal(loss_fn.t.grad, k * expected) and loss_fn.calls == k  # nobody clears it here


def test_a_loss_that_holds_the_model() -> None:
    """The gradients that both own are back as well."""

    class Loss(Temperature):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    for name in FAMILY:
        optimizer, loss_fn = FAMILY[name].make(model, **COMMON), Loss(model)
        batch = Minibatch(model, loss_fn, X, Y, sample_targets=lambda output, y, generator: output.argmax(1))
        before = model.weight.detach().clone()
        optimizer.step(batch)
        assert model.weight.grad is not None and loss_fn.t.grad is not None
        assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", rows(lambda member: member.repeats))
def test_a_bad_batch_stays_bad_where_gradients_are_cleared_after_the_step(name: str) -> None:
    """A gradient can be bad where both passes are good: here something is added to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = FAMILY[name].make(model, **COMMON)
    for _ in range(2):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    before = {(p, key): value.clone() for p, state in optimizer.state.items() for key, value in state.items()}
    with optimizer.first_pass():
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
    model[0].weight.grad[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.second_pass():
        F.cross_entropy(model(X), Y).backward()
    assert [key for (p, key), value in before.items() if not torch.equal(optimizer.state[p][key], value)] == []


def test_a_good_batch_is_learned_from_whatever_becomes_of_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = KBFGS.as_printed(model, curvature_update_freq=1, **COMMON)
    with optimizer.first_pass():
        F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    for p in model.parameters():
        p.grad.fill_(float("inf"))
    with optimizer.second_pass():
        F.cross_entropy(model(X), Y).backward()
    assert [d.G.kept for d in optimizer.diagnostics() if d.G is not None] == [1, 1]
