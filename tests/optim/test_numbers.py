"""Hyperparameters are numbers, whoever's: NumPy's and torch's make the run of Python's, and the same checkpoint."""

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from kfqn_ext.optim import KBFGS, Minibatch, ProvableKBFGSL
from kfqn_ext.optim.numbers import integer, is_count, number
from tests.optim.family import FAMILY, classes, rows

X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
each_class = pytest.mark.parametrize("name", classes())
# All of these are the same in float32, and as integers.
VALUES: dict[str, Any] = {
    "lr": 0.25,
    "damping": 0.5,
    "momentum": 0.75,
    "weight_decay": 0.125,
    "T": 2,
    "inverse_update_freq": 2,
}
OPTIONS: dict[str, Any] = {"step_cap": 0.5, "second_pass_fraction": 0.5}
KINDS: dict[str, Callable[[Any], Any]] = {
    "NumPy, 32 bits": lambda v: np.int32(v) if isinstance(v, int) else np.float32(v),
    "NumPy, 64 bits": lambda v: np.int64(v) if isinstance(v, int) else np.float64(v),
    "NumPy, an array": np.array,
    "torch": torch.tensor,
    "a fraction": lambda v: v if isinstance(v, int) else Fraction(v),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for k in range(steps):
        torch.manual_seed(k)  # of sampled targets
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def through_a_file(optimizer: Any) -> Any:
    """As safe loading allows: numbers, strings and tensors alone."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names", "direction_dtype", "layout"):
                values = value.values() if isinstance(value, dict) else [value]
                assert all(v is None or type(v) in (int, float) for v in values), (key, value)
    through_a_file(optimizer)


def given(name: str) -> dict[str, Any]:
    member = FAMILY[name]
    return {key: v for key, v in VALUES.items() if key in ("lr", "T") or member.takes(key)}


@each_class
@each_kind
def test_given_to_the_constructor(name: str, kind: str) -> None:
    make, values = KINDS[kind], given(name)
    model, twin = net(), net()
    optimizer = FAMILY[name].make(model, **{key: make(v) if key != "lr" else v for key, v in values.items()})
    other = FAMILY[name].make(twin, **values)
    plain(optimizer)
    assert optimizer.state_dict() == other.state_dict()
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)
    for lr in (make(0.25),) if kind != "torch" else ():
        plain(FAMILY[name].make(net(), **{**values, "lr": lr}))


@each_class
@each_kind
@pytest.mark.parametrize("how", ["group", "later", "schedule", "schedule that goes on"])
def test_given_otherwise(name: str, kind: str, how: str) -> None:
    """In a group, set by hand, and from a function; the checkpoint holds them, and is loaded."""
    make, values = KINDS[kind], given(name)
    member, model, twin = FAMILY[name], net(), net()
    key_of = {"T": member.T}
    theirs = {key_of.get(key, key): make(v) for key, v in values.items() if not (key == "lr" and how == "later")}
    other = member.make(twin, **values)
    if how == "group":
        optimizer = member.make(model, lr=1.0, params=[{"params": [*model.parameters()], **theirs}])
    elif how == "later":
        optimizer = member.make(model, lr=values["lr"])
        optimizer.param_groups[0].update(theirs)
    else:
        functions = {key: (lambda k, v=v: v) for key, v in theirs.items() if key != "momentum"}
        functions = functions if how == "schedule" else {"lr": functions["lr"], member.T: functions[member.T]}
        rest = {key: v for key, v in values.items() if key_of.get(key, key) not in functions}
        optimizer = member.make(
            model, **rest, **{("T" if key == member.T else key): f for key, f in functions.items() if key in theirs}
        )
    for key, value in values.items():
        assert optimizer.state_dict()["param_groups"][0][key_of.get(key, key)] == value, key
    if kind != "torch" or how != "group":  # a rate that is a tensor stays one
        plain(optimizer)
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)
    third = net()
    again = member.make(third, lr=0.1)
    again.load_state_dict(through_a_file(optimizer))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch"])
@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for option in OPTIONS for name in classes() if FAMILY[name].takes(option)],
)
def test_options(name: str, option: str, kind: str) -> None:
    model, twin = net(), net()
    optimizer = FAMILY[name].make(model, lr=0.1, **{option: KINDS[kind](OPTIONS[option])})
    other = FAMILY[name].make(twin, lr=0.1, **{option: OPTIONS[option]})
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)


@each_kind
@pytest.mark.parametrize("name", rows(lambda member: member.limited))
def test_the_number_of_pairs(name: str, kind: str) -> None:
    optimizer = FAMILY[name].with_memory(KINDS[kind](3)).make(net(), lr=0.1)
    kept = [
        getattr(rule, "history_size", 3) for rule in (optimizer.recipe.input_inverse, optimizer.recipe.output_inverse)
    ]
    assert kept == [3, 3] and {type(p) for p in kept} == {int}


@each_kind
def test_the_provable_variant_s_own(kind: str) -> None:
    make = KINDS[kind]
    own = {"damping_A": 0.5, "damping_G": 0.25, "mu1": 0.25, "decay": 0.5}
    models = net(), net()
    optimizers = [ProvableKBFGSL(models[0], lr=0.1, **{key: make(v) for key, v in own.items()})]
    optimizers.append(ProvableKBFGSL(models[1], lr=0.1, **own))
    for model, optimizer in zip(models, optimizers, strict=True):
        plain(optimizer)
        train(model, optimizer)
    assert same(*models)


def test_schedulers_that_count_in_numpy() -> None:
    """What they write comes after the last step, and is of Python's in the checkpoint all the same."""
    model = net()
    optimizer = KBFGS(model, lr=0.5)
    scheduler = LambdaLR(optimizer, lambda k: np.float64(0.5) ** k)
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    plain(optimizer)
    optimizer = KBFGS(model, lr=np.float32(0.5))
    OneCycleLR(optimizer, max_lr=[np.float64(0.5)], total_steps=4)
    through_a_file(optimizer)


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    """torch's schedulers write into it."""
    lr = torch.tensor(0.5)
    optimizer = KBFGS(net(), lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    optimizer.param_groups[0]["somebody's"] = kept = torch.ones(())
    through_a_file(optimizer)
    assert optimizer.param_groups[0]["somebody's"] is kept and optimizer.param_groups[0]["lr"] is lr


@each_class
@pytest.mark.parametrize("value", [True, np.True_, np.float64(2.0), np.int64(0), torch.tensor(2.0), "2", None])
def test_what_is_no_count(name: str, value: Any) -> None:
    for make in (lambda v: v, lambda v: lambda k: v):
        with pytest.raises(ValueError, match=f"Invalid {FAMILY[name].T}: .* an integer of at least 1"):
            FAMILY[name].make(net(), lr=0.1, T=make(value))


@each_class
@pytest.mark.parametrize("key", ["lr", "damping", "momentum", "weight_decay"])
@pytest.mark.parametrize("value", ["0.1", [0.1], None, 1j, torch.ones(2)], ids=str)
def test_what_is_no_number(name: str, key: str, value: Any) -> None:
    if FAMILY[name].takes(key) and not (key == "lr" and isinstance(value, torch.Tensor)):
        with pytest.raises(ValueError, match=f"Invalid {key}: .* must be a number"):
            FAMILY[name].make(net(), **{"lr": 0.1, key: value})


@pytest.mark.parametrize("value", [0, 3, 0.5, True, None, "3", float("inf")])
def test_numbers_of_python_stay(value: Any) -> None:
    assert number(value) is value


def test_counts() -> None:
    class Own:
        def __index__(self) -> int:
            return 4

    assert [integer(v) for v in (np.int8(3), torch.tensor(3), np.array(3), Own())] == [3, 3, 3, 4]
    assert [is_count(v) for v in (1, 0, True, 1.0, None)] == [True, False, False, False, False]
