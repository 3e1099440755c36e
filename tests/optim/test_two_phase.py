"""The two passes of a step, in one call or in two phases: what they share and what they leave behind."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, rows

each = pytest.mark.parametrize("name", rows(lambda member: not member.samples))  # a closure does not sample
SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1.0, "weight_decay": 1e-3}


def make(name: str, model: nn.Module, T: int = 1, **options: Any) -> Any:
    return FAMILY[name].make(model, **{"lr": 0.1, "T": T} | FAMILY[name].taken(weight_decay=1e-3) | options)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(100, 3),
    )


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 2, 5, 5), torch.arange(8) % 3) for _ in range(number)]


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All tensors that a step may change."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        tensors[f"{name}.grad"] = torch.zeros(()) if p.grad is None else p.grad
        tensors.update(
            {f"{name}.{key}": value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)}
        )
    return {name: value.clone() for name, value in tensors.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def minibatch(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return optimizer.step(Minibatch(model, F.cross_entropy, x, y))


def closure(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(evaluate).detach()


def two_phases(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    with optimizer.first_pass():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    assert optimizer.step() is None
    if optimizer.second_pass_due:
        with optimizer.second_pass():
            F.cross_entropy(model(x), y).backward()
    assert not optimizer.second_pass_due
    return loss.detach()


@each
@pytest.mark.parametrize("T", [1, 3])
def test_all_forms_of_a_step_are_the_same_bit_for_bit(name: str, T: int) -> None:
    model, data = net(), batches(7)
    results = []
    for form in (minibatch, closure, two_phases):
        torch.manual_seed(2)
        twin = copy.deepcopy(model)
        optimizer = make(name, twin, T)
        losses = torch.stack([form(optimizer, twin, *batch) for batch in data])
        results.append({"losses": losses, "rng": torch.get_rng_state(), **snapshot(twin, optimizer)})
    equal(results[1], results[0])
    equal(results[2], results[0])
    assert results[0][f"5.weight.{FAMILY[name].learned_A}"].isfinite().all()
    assert ("0.weight.s_G" in results[0]) == FAMILY[name].secant_G


@each
@pytest.mark.parametrize("form", [minibatch, closure, two_phases])
def test_what_a_step_leaves_is_of_the_first_pass(name: str, form: Callable[..., Tensor]) -> None:
    """The loss, .grad, BatchNorm's statistics and the random numbers: as after one ordinary forward-backward pass."""
    model, plain = net(), net()
    optimizer = make(name, model, T=2)
    for step, (x, y) in enumerate(batches(4), start=1):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        state = torch.get_rng_state()
        want = F.cross_entropy(plain(x), y)
        want.backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(form(optimizer, model, x, y), want.detach())
        assert torch.equal(torch.get_rng_state(), after)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) and p.requires_grad
        for (of, b), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(b, expected), of
        assert model[1].num_batches_tracked == step


@pytest.mark.parametrize("name", rows(lambda member: member.secant_G))
def test_dropout_draws_the_same_mask_in_both_passes(name: str) -> None:
    """With lr = 0 the second pass is the first one again: Δh̄ = Δ∂h̄ = 0, exactly."""
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3))
    optimizer, (x, y) = make(name, model, lr=0.0), (torch.randn(8, 6), torch.arange(8) % 3)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        minibatch(optimizer, model, x, y)
    for layer in (model[0], model[4]):
        assert not optimizer.state[layer.weight]["s_G"].any() and not optimizer.state[layer.weight]["y_G"].any()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("T", [1, 2, 4])
def test_the_second_pass_runs_on_every_Tth_step_only(T: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=T)
    x, y, calls = torch.randn(8, 4), torch.arange(8) % 3, []

    def evaluate() -> Tensor:
        assert torch.is_grad_enabled()
        calls.append(model.weight.requires_grad)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    passes = []
    for _ in range(8):
        calls.clear()
        optimizer.step(evaluate)
        passes.append(list(calls))
    assert passes == [[True, False] if step % T == 0 else [True] for step in range(1, 9)]


def test_closure_sees_the_moved_parameters_in_the_second_pass_only() -> None:
    model = nn.Linear(4, 3)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    x, y, seen = torch.randn(8, 4), torch.arange(8) % 3, []

    def evaluate() -> Tensor:
        seen.append(model.weight.detach().clone())
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    optimizer.step(evaluate)
    assert torch.equal(seen[0], before) and torch.equal(seen[1], model.weight) and not torch.equal(seen[0], seen[1])


def test_a_second_pass_that_raises_leaves_gradients_and_buffers() -> None:
    model, (x, y) = net(), batches(1)[0]
    optimizer, calls = KBFGS.as_printed(model, curvature_update_freq=1, **SETTINGS), []

    def evaluate() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if len(calls) == 2:
            raise KeyError("in the second pass")
        return loss

    with pytest.raises(KeyError, match="second pass"):
        optimizer.step(evaluate)
    assert all(p.requires_grad and p.grad is not None and p.grad.any() for p in (model[0].weight, model[5].weight))
    assert model[1].num_batches_tracked == 1 and not optimizer.second_pass_due
    minibatch(optimizer, model, x, y)  # and training goes on


def test_a_second_pass_that_is_left_out_is_said_once() -> None:
    model, data = net(), batches(4)
    optimizer = KBFGS.as_printed(model, curvature_update_freq=1, **SETTINGS)

    def first_phase(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with optimizer.first_pass():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    first_phase(*data[0])
    H = optimizer.state[model[5].weight]["H_A"].clone()
    with pytest.warns(UserWarning, match="second pass was due and never ran"):
        first_phase(*data[1])
    first_phase(*data[2])  # a second warning would be an error here
    assert torch.equal(optimizer.state[model[5].weight]["H_A"], H)


def test_a_second_pass_that_is_not_due_is_refused() -> None:
    optimizer = KBFGS.as_printed(net(), curvature_update_freq=2, **SETTINGS)
    with pytest.raises(RuntimeError, match="second_pass_due"), optimizer.second_pass():
        pass


def test_step_hooks_run_once_for_a_step() -> None:
    model, (x, y) = net(), batches(1)[0]
    optimizer, order = KBFGS.as_printed(model, curvature_update_freq=1, **SETTINGS), []
    weight = model[5].weight.detach().clone()
    pre = optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: order.append(("pre", torch.equal(model[5].weight, weight)))
    )
    post = optimizer.register_step_post_hook(
        lambda opt, args, kwargs: order.append(("post", torch.equal(model[5].weight, weight)))
    )
    minibatch(optimizer, model, x, y)
    assert order == [("pre", True), ("post", False)]
    pre.remove()
    post.remove()
    minibatch(optimizer, model, x, y)
    assert len(order) == 2


def test_clipping_and_accumulating_gradients_between_the_phases() -> None:
    """What a loop does to .grad before step() decides the direction; it does not disturb the second pass."""
    model, data = net(), batches(3)
    optimizer = KBFGS.as_printed(model, curvature_update_freq=1, **SETTINGS)
    for x, y in data:
        optimizer.zero_grad()
        with optimizer.first_pass():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        with optimizer.second_pass():
            F.cross_entropy(model(x), y).backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), clipped, strict=True))
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() < 1.1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each
def test_a_batch_that_is_not_finite_changes_nothing(name: str, bad: float) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer, x, y = make(name, model), torch.randn(8, 6), torch.arange(8) % 3
    for _ in range(3):
        minibatch(optimizer, model, x, y)

    def tensors() -> dict[str, Tensor]:
        return {of: value for of, value in snapshot(model, optimizer).items() if not of.endswith("grad")}

    before = tensors()
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step(Minibatch(model, lambda output, y: F.cross_entropy(output, y) * bad, x, y))
    equal(tensors(), before)
    minibatch(optimizer, model, x, y)
    assert all(value.isfinite().all() for value in tensors().values())
