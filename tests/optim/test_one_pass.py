"""``loss.backward(); optimizer.step()``: the formulas, the other forms of a step, schedules, resuming, no waiting."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch, OnePassKBFGS, gate
from kfqn_ext.optim.late_warning import LateWarning
from tests.optim import test_family_trajectories as trajectories
from tests.optim import test_no_waiting as waiting
from tests.optim import test_two_phase as forms
from tests.optim.plain_loop import backward, batch, left, net, train
from tests.optim.test_resume import assert_identical
from tests.optim.twins import UntunedOnePass

both_T = pytest.mark.parametrize("T", [1, 3])

# ------------------------------------------------------------------ the formulas


@both_T
def test_ten_steps_equal_the_reference(T: int) -> None:
    """Also of parameters without a block, with weight decay and batches of different sizes."""
    model, twin, data = trajectories.net(), trajectories.net(), trajectories.batches()
    optimizer = OnePassKBFGS(model, lr=0.1, damping=0.5, curvature_update_freq=T, weight_decay=0.01)
    reference = UntunedOnePass(twin, F.cross_entropy, 0.1, 0.5, T=T, momentum=0.8, weight_decay=0.01)
    torch.manual_seed(2)
    for k in range(10):
        x, y = data[k % len(data)]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(2)
    for k in range(10):
        reference.step(*data[k % len(data)])
    trajectories.compare(optimizer, model, reference, twin)
    for d in optimizer.diagnostics():
        want = reference.state[d.name]
        assert (want.H_G - want.H_G0).abs().max() > 0.01 * want.H_G0.abs().max(), d.name
        assert bool(d.A.kept) and bool(d.G.kept), d.name


# ------------------------------------------------------------------ the forms of a step


def plain(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert optimizer.step() is None
    return loss.detach()


@pytest.mark.parametrize("form", [forms.two_phases, forms.closure, forms.minibatch])
@both_T
def test_other_forms_are_the_same_bit_for_bit(form: Any, T: int) -> None:
    """A pass that is announced, and closures of both kinds; with BatchNorm, dropout and operations in place."""
    model, data, found = forms.net(), forms.batches(7), []
    for each in (plain, form):
        torch.manual_seed(2)
        twin = copy.deepcopy(model)
        optimizer = OnePassKBFGS(twin, curvature_update_freq=T)
        losses = torch.stack([each(optimizer, twin, *one) for one in data])
        found.append({"losses": losses, "rng": torch.get_rng_state(), **forms.snapshot(twin, optimizer)})
    forms.equal(*found)


def test_a_penalty_of_gradients_is_the_same_bit_for_bit() -> None:
    """The pass through it is the one that adds to .grad; the pass that made it does not."""

    def penalized(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        x = x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + g.square().sum()).backward()

    def announced(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        with optimizer.first_pass():
            penalized(model, optimizer, x, y)

    found = []
    for passes in (penalized, announced):
        model = net()
        optimizer = OnePassKBFGS(model)
        train(model, optimizer, passes=passes)
        found.append(left(model, optimizer))
    assert_identical(*found)


def test_forms_can_take_turns() -> None:
    def turns(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        if optimizer.param_groups[0]["step"] % 2:
            with optimizer.first_pass():
                backward(model, optimizer, x, y)
        else:
            backward(model, optimizer, x, y)

    found = []
    for passes in (backward, turns):
        model = net()
        optimizer = OnePassKBFGS(model)
        train(model, optimizer, range(4), passes=passes)
        optimizer.step(Minibatch(model, F.cross_entropy, *batch(4)))
        train(model, optimizer, range(5, 7), passes=passes)
        found.append(left(model, optimizer))
    assert_identical(*found)


# ------------------------------------------------------------------ schedules


def test_no_function_is_called_for_a_step_before_it_begins() -> None:
    """T and λ by functions of their own, α by one of torch's schedulers."""
    asked: dict[str, list[int]] = {"T": [], "damping": []}

    def follow(name: str, value: Any) -> Any:
        return lambda k: asked[name].append(k) or value(k)

    model = net()
    optimizer = OnePassKBFGS(
        model, curvature_update_freq=follow("T", lambda k: 1 + k // 3), damping=follow("damping", lambda k: 0.3 + k)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for k in range(1, 7):
        with torch.no_grad():
            model(batch(0)[0])  # an evaluation begins no step
        assert {max(steps) for steps in asked.values()} == {max(k - 1, 1)}
        backward(model, optimizer, *batch(k))
        assert {max(steps) for steps in asked.values()} == {k}
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert {max(steps) for steps in asked.values()} == {k}
        assert (optimizer.param_groups[0]["damping"], optimizer.param_groups[0]["lr"]) == (
            0.3 + k,
            schedule.get_last_lr()[0],
        )


def test_it_learns_when_the_schedule_says_so() -> None:
    model, T, learned = net(), lambda k: 1 + k // 3, []
    optimizer = OnePassKBFGS(model, curvature_update_freq=T)
    for k in range(1, 10):
        before = [int(d.A.kept + d.G.kept) for d in optimizer.diagnostics()] if k > 1 else [0] * 3
        train(model, optimizer, range(k, k + 1))
        if any(int(d.A.kept + d.G.kept) > old for d, old in zip(optimizer.diagnostics(), before, strict=True)):
            learned.append(k)
    assert learned == [k for k in range(2, 10) if k % T(k) == 0]  # the first makes H_A, of its own A


# ------------------------------------------------------------------ what was learned goes on


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    """Whatever the optimizer that loads it has heard before, when it was not to learn."""
    model = net()
    optimizer = OnePassKBFGS(model, curvature_update_freq=3)
    train(model, optimizer, range(2))
    saved = left(model, optimizer)
    other = net()
    resumed = OnePassKBFGS(other, curvature_update_freq=3)
    backward(other, resumed, *batch(9))
    other.zero_grad()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(2, 6))
    assert_identical(left(other, resumed), left(model, optimizer))


# ------------------------------------------------------------------ no waiting


def step(model: nn.Module, optimizer: Any, k: int) -> None:
    waiting.batch(model, k).loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_loop_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps with and without updates, after the two that make the initial curvature."""
    monkeypatch.setattr(LateWarning, "_read", lambda self, flag: None)  # which on a GPU waits for nothing
    monkeypatch.setattr(gate, "is_on_host", lambda t: False)
    model = waiting.net()
    optimizer = OnePassKBFGS(model, curvature_update_freq=2)
    for k in range(2):
        step(model, optimizer, k)
    on_host = {s["num_locations"].data_ptr() for s in optimizer.state.values() if "num_locations" in s}
    with waiting.Reads(on_host) as mode:
        for k in range(2, 8):
            step(model, optimizer, k)
    assert mode.found == []
    assert waiting.hidden_reads(lambda: [step(model, optimizer, k) for k in range(8, 10)]) == []


def test_the_first_step_reads() -> None:
    """So that the test above can fail: initial curvature is checked when it is made."""
    model = waiting.net()
    optimizer = OnePassKBFGS(model)
    with waiting.Reads(set()) as mode:
        step(model, optimizer, 0)
    assert mode.found != []
