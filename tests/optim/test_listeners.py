"""An optimizer listens to its own layers, as they are now, for as long as it lives."""

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from kfqn_ext.extensions import base, hooks
from kfqn_ext.optim import OnePassKBFGS
from tests.optim.plain_loop import backward, batch, left, net, train
from tests.optim.test_resume import assert_identical


def announced(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    with optimizer.first_pass():
        backward(model, optimizer, x, y)


# ------------------------------------------------------------------ two optimizers


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def parameters(*modules: nn.Module) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def states(*optimizers: Any) -> list[Any]:
    return [optimizer.state[p] for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]


def test_two_optimizers_with_half_of_the_layers_each_are_one_with_all() -> None:
    whole, halves = net(), net()
    one = OnePassKBFGS(whole)
    two = [OnePassKBFGS(halves, params=parameters(*part)) for part in (halves[:3], halves[3:])]
    train(whole, one)
    train(halves, Both(*two))
    assert_identical(halves.state_dict(), whole.state_dict())
    assert_identical(states(*two), states(one))


def test_one_of_two_optimizers_steps_alone() -> None:
    """What the other has heard waits for its own step, or for its gradients to be cleared."""
    model, alone = net(), net()
    first, last = (OnePassKBFGS(model, params=parameters(*part)) for part in (model[:3], model[3:]))
    other = OnePassKBFGS(alone, params=parameters(alone[:3]))
    train(model, first)
    train(alone, other)
    assert_identical(model.state_dict(), alone.state_dict())
    assert_identical(states(first), states(other))
    assert not last.state


# ------------------------------------------------------------------ how long it lives


def test_an_optimizer_is_not_kept_by_its_model() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model, None, *batch(0))
    train(model, OnePassKBFGS(model))


def test_an_optimizer_between_backward_and_step_is_not_kept_either() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    backward(model, optimizer, *batch(0))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later step"])
def test_what_is_heard_keeps_no_input(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)  # in the first step, calls of fewer wait for others
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, range(steps))
    x, y = batch(steps)
    seen = x.untyped_storage()._weak_ref()
    backward(model, optimizer, x, y)
    del x
    assert torch.UntypedStorage._expired(seen)
    torch.UntypedStorage._free_weak_ref(seen)
    optimizer.step()


def test_a_model_is_not_kept_by_those_that_listened_to_it() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer)
    gone = [weakref.ref(module) for module in model.modules()]
    del model, optimizer
    gc.collect()
    assert not any(ref() for ref in gone)


def test_listeners_that_are_gone_do_not_add_up() -> None:
    model = net()
    for _ in range(10):
        train(model, OnePassKBFGS(model), range(1))
    gc.collect()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, range(1))
    assert {len(hooks._listeners[model[i]]) for i in (0, 3, 6)} == {1}


def test_a_copy_of_a_model_has_no_listener() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    twin = copy.deepcopy(model)
    backward(twin, None, *batch(0))
    with pytest.raises(RuntimeError, match="No parameter has a gradient"):
        optimizer.step()


# ------------------------------------------------------------------ layers that come later


@pytest.mark.parametrize("passes", [backward, announced])
def test_a_group_that_is_added_later_is_measured(passes: Any) -> None:
    model = net()
    optimizer = OnePassKBFGS(model, params=parameters(model[3:]))
    train(model, optimizer, range(2), passes=passes)
    assert "H_A" not in optimizer.state[model[0].weight]
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, range(2, 5), passes=passes)
    found = optimizer.state[model[0].weight]
    assert found["pairs_seen_A"][0].tolist() == [10, 10]  # five directions in each pass but the first
    assert found["pairs_seen_G"][0].tolist() == [8, 8]  # and four


def grown(passes: Any) -> dict[str, Any]:
    """A group is added, and a layer unfrozen."""
    model = net()
    model[6].requires_grad_(False)
    optimizer = OnePassKBFGS(model, params=parameters(model[3:]))
    train(model, optimizer, range(2), passes=passes)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, range(2, 4), passes=passes)
    model[6].requires_grad_(True)
    train(model, optimizer, range(4, 6), passes=passes)
    assert all("H_G" in optimizer.state[model[i].weight] for i in (0, 3, 6))
    return left(model, optimizer)


def test_layers_that_come_later_learn_as_in_announced_passes() -> None:
    assert_identical(grown(backward), grown(announced))


def test_a_layer_that_is_frozen_again_stays_as_it_is() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, range(2))
    model[0].requires_grad_(False)
    before = copy.deepcopy((model[0].state_dict(), dict(optimizer.state[model[0].weight])))
    train(model, optimizer, range(2, 4))
    assert_identical((model[0].state_dict(), dict(optimizer.state[model[0].weight])), before)


# ------------------------------------------------------------------ where it does not


def test_a_weight_that_was_replaced_is_named_before_anything_moves() -> None:
    """The optimizer does not know the new one; the bias is still its own."""
    model = net()
    optimizer, before = OnePassKBFGS(model), copy.deepcopy(model.state_dict())
    model[6].weight = nn.Parameter(model[6].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"new parameters in the places of 6\.weight"):
        train(model, optimizer, range(1))
    assert_identical(model.state_dict(), before)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    backward(model, optimizer, *batch(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="OnePassKBFGS in 2 processes"):
        optimizer.step()
    assert_identical(model.state_dict(), before)


def test_layers_that_are_not_called_are_named() -> None:
    """Their weights are used all the same."""
    model = net()
    optimizer = OnePassKBFGS(model)
    x, y = batch(0)
    h = model[:5](x).flatten(1)
    F.cross_entropy(F.linear(h, model[6].weight, model[6].bias), y).backward()
    with pytest.warns(UserWarning, match=r"Layer 6 has a gradient but was not measured"):
        optimizer.step()
    assert "H_A" in optimizer.state[model[3].weight] and "H_A" not in optimizer.state[model[6].weight]
    optimizer.zero_grad()


def test_a_step_of_layers_that_were_never_measured_is_refused() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="nothing measured"):
        optimizer.step()


# ------------------------------------------------------------------ several threads


def test_the_first_layers_of_two_threads_are_measured_together() -> None:
    """Autograd has a thread for each device: those of a model on two of them may reach their first layers at once."""
    model = nn.ModuleDict({name: nn.Linear(4, 3) for name in "ab"})
    optimizer, both_are_here = OnePassKBFGS(model), threading.Barrier(2, timeout=30)
    begin = optimizer._begin_listening

    def slowly() -> Any:
        time.sleep(0.1)
        return begin()

    def one(layer: nn.Module) -> None:
        loss = layer(torch.rand(8, 4)).square().mean()
        both_are_here.wait()
        loss.backward()

    optimizer._begin_listening = slowly  # type: ignore[method-assign]
    threads = [threading.Thread(target=one, args=(layer,)) for layer in model.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    assert all("H_A" in optimizer.state[layer.weight] for layer in model.values())
