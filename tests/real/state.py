"""What is saved and loaded: everything, as precisely as it was, into what fits, and nothing into what does not."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kfqn_ext.optim import KBFGS, KBFGSL, Minibatch
from kfqn_ext.optim.inverses import ScaledIdentity
from tests.optim.family import FAMILY, classes, firsts

X, Y = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 3)
    ).to(dtype)  # fmt: skip


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        torch.manual_seed(0)  # of targets that are sampled
        optimizer.step(Minibatch(model, F.cross_entropy, X.to(model[0].weight.dtype), Y))


def started(make: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = net(dtype)
    optimizer = make(model, lr=0.05)
    train(model, optimizer)
    return model, optimizer


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location="cpu")


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> None:
    """Bit for bit, dtypes included."""
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(p, q)
        one, other = a[1].state.get(p, {}), b[1].state.get(q, {})
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key
    assert [{k: v for k, v in g.items() if k != "params"} for g in a[1].param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in b[1].param_groups
    ]


def resumed(make: Any, dtype: torch.dtype = torch.float32) -> None:
    model, optimizer = started(make, dtype)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = net(dtype)
    twin.load_state_dict(saved["model"])
    other = make(twin, lr=0.05)
    other.load_state_dict(saved["optimizer"])
    same((model, optimizer), (twin, other))
    train(model, optimizer)
    train(twin, other)
    same((model, optimizer), (twin, other))


def every_optimizer_resumes() -> None:
    for member in FAMILY.values():
        resumed(member.make)


def bfloat16_parameters() -> None:
    for name in firsts(lambda member: member.build):
        resumed(FAMILY[name].make, torch.bfloat16)
    _, optimizer = started(KBFGS, torch.bfloat16)
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32, torch.int64}


def loaded_twice() -> None:
    """From one dictionary, which stays as it is and shares no memory with what was loaded."""
    model, optimizer = started(KBFGSL)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    for _ in range(2):
        twin = net()
        twin.load_state_dict(model.state_dict())
        other = KBFGSL(twin, lr=0.05)
        other.load_state_dict(saved)
        other.load_state_dict(saved)
        same((model, optimizer), (twin, other))
        train(twin, other)
        for i, entry in kept["state"].items():
            assert all(torch.equal(value, saved["state"][i][key]) for key, value in entry.items())


def around_schedulers() -> None:
    """Loaded before or after a scheduler is built, the scheduler moves the rate of the loaded groups."""
    model, optimizer = started(KBFGS)
    saved = optimizer.state_dict()
    for before in (True, False):
        twin = net()
        other: Any = KBFGS(twin, lr=0.05)
        if before:
            other.load_state_dict(saved)
        schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
        if not before:
            other.load_state_dict(saved)
        train(twin, other, 1)
        schedule.step()
        assert other.param_groups[0]["lr"] == 0.025
        weight = twin[4].weight.detach().clone()
        other.param_groups[0]["lr"] = 0.0
        train(twin, other, 1)
        assert torch.equal(twin[4].weight, weight)


def older_layout() -> None:
    model, optimizer = started(KBFGS)
    saved = optimizer.state_dict()
    for mark, found in ((None, "0, without a mark"), ("0 HessianAction SecantBFGS", "0 HessianAction")):
        old = copy.deepcopy(saved)
        for group in old["param_groups"]:
            group.pop("layout") if mark is None else group.update(layout=mark)
        with pytest.raises(ValueError, match=f"has the layout '{found}.* reads '2 StepHessianAction SecantBFGS'"):
            optimizer.load_state_dict(old)
    train(model, optimizer, 1)


def other_optimizer_or_model() -> None:
    """Refused before anything changes."""
    model, optimizer = started(KBFGS)
    for name in [name for name in classes() if FAMILY[name].build is not KBFGS]:
        other = FAMILY[name].make(net(), lr=0.05)
        with pytest.raises(ValueError, match="was saved by another version of the package or by another optimizer"):
            other.load_state_dict(optimizer.state_dict())
        assert not other.state
    wider = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3))
    other = KBFGS(wider, lr=0.05)
    with pytest.raises(ValueError, match=r"momentum of shape \[4, 19\] where this model needs \[5, 19\]"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def nothing_but_tensors() -> None:
    """Safe loading: numbers, strings and tensors; and no module, function or activation."""
    _, optimizer = started(KBFGSL)
    saved = optimizer.state_dict()
    assert all(isinstance(v, Tensor) for s in saved["state"].values() for v in s.values())
    through_a_file(saved)


def dead_layer_after_resuming() -> None:
    """The first step after loading, with a layer that gets no gradient in it."""
    model = nn.ModuleDict({"a": nn.Linear(50, 3), "b": nn.Linear(50, 3)})
    optimizer = KBFGS(model, lr=0.05, damping=1.0)

    def closure(optimizer: Any, model: Any, both: bool) -> Tensor:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            x = X.flatten(1)
            loss = F.cross_entropy(model["a"](x) + (model["b"](x) if both else 0), Y)
            loss.backward()
            return loss

        return optimizer.step(evaluate)

    for _ in range(2):
        closure(optimizer, model, True)
    saved = through_a_file(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = KBFGS(twin, lr=0.05, damping=1.0)
    other.load_state_dict(saved)
    before = twin["b"].weight.detach().clone()
    closure(other, twin, False)
    assert torch.equal(twin["b"].weight, before)
    closure(other, twin, True)
    assert not torch.equal(twin["b"].weight, before)


def distributed_checkpoint() -> None:
    """The flat form of torch.distributed.checkpoint, into an optimizer that never took a step."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for member in FAMILY.values():
        model, optimizer = started(member.make)
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        kept = "gamma_G" if isinstance(member.recipe.output_inverse, ScaledIdentity) else "H_G"
        assert f"state.4.weight.{kept}" in flat and "param_groups.4.weight.layout" in flat
        twin = net()
        twin.load_state_dict(model.state_dict())
        other = member.make(twin, lr=0.05)
        weights = copy.deepcopy(twin.state_dict())
        assert get_optimizer_state_dict(twin, other, options=options).keys() == flat.keys()
        assert all(torch.equal(v, weights[k]) for k, v in twin.state_dict().items())
        set_optimizer_state_dict(twin, other, through_a_file(flat), options=options)
        same((model, optimizer), (twin, other))
        train(model, optimizer)
        train(twin, other)
        same((model, optimizer), (twin, other))
    # What was only shaped for loading is forgotten when training starts without it.
    model, twin = net(), net()
    optimizer, other = KBFGS(model, lr=0.05), KBFGS(twin, lr=0.05)
    get_optimizer_state_dict(twin, other, options=options)
    train(model, optimizer)
    train(twin, other)
    same((model, optimizer), (twin, other))
    # A state of before the first step is as good as none.
    again = net()
    empty = KBFGS(again, lr=0.05)
    flat = get_optimizer_state_dict(again, empty, options=options)
    model, twin = net(), net()
    optimizer, other = KBFGS(model, lr=0.05), KBFGS(twin, lr=0.05)
    set_optimizer_state_dict(twin, other, flat, options=options)
    train(model, optimizer)
    train(twin, other)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def pickle_and_deepcopy() -> None:
    _, optimizer = started(KBFGS)
    for trip in (copy.deepcopy, pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="KBFGS belongs to its model.*build a new optimizer on the new model"):
            trip(optimizer)


def moving_a_model() -> None:
    """State follows to where the parameters are when it is loaded; |T| stays a number of the host."""
    model, optimizer = started(KBFGS)
    saved = optimizer.state_dict()
    with torch.device("meta"):
        elsewhere = net()
    other = KBFGS(elsewhere, lr=0.05)
    other.load_state_dict(saved)
    state = other.state[elsewhere[4].weight]
    assert state["H_A"].device.type == "meta" and state["num_locations"].device.type == "cpu"
    back = KBFGS(twin := net(), lr=0.05)
    back.load_state_dict(through_a_file(saved))
    assert back.state[twin[4].weight]["H_A"].device.type == "cpu"
