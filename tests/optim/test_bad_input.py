"""Bad input gets one clear error, and leaves the model and the optimizer as they were."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import backpack
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfqn_ext
from kfqn_ext.errors import MissingQuantitiesError, UnsupportedLayerError
from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import KBFGS, Minibatch
from kfqn_ext.optim.inverses import (
    FisherAction,
    FisherInverse,
    GammaInverse,
    MovingHessianAction,
    MovingInverse,
    OmegaInverse,
    StepHessianAction,
)
from kfqn_ext.optim.recipe import SecondPass
from tests.optim.family import FAMILY, Member, classes, one_per, rows

each_class = pytest.mark.parametrize("name", classes())


def kind(member: Member) -> Any:
    """What an error before a step may depend on, whatever the rules are."""
    return member.build, member.recipe.second_pass


each = pytest.mark.parametrize("name", one_per(kind))
with_closures = pytest.mark.parametrize("name", one_per(kind, rows(lambda member: not member.samples)))
started = pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
X, Y = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]


def make(name: str, steps: int, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = net() if model is None else model
    optimizer = FAMILY[name].make(model, lr=0.1)
    for _ in range(steps):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    return model, optimizer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) else a == b


@contextmanager
def unchanged(model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Parameters, buffers, hooks and the optimizer's state are the same after the body, and training goes on."""

    def everything() -> Any:
        state = None if optimizer is None else optimizer.state_dict()
        modes = [p.requires_grad for p in model.parameters()] + [m.training for m in model.modules()]
        return copy.deepcopy((dict(model.state_dict()), state, hooks(model), modes))

    before = everything()
    yield
    for name, a, b in zip(("model", "optimizer", "hooks", "modes"), before, everything(), strict=True):
        assert same(a, b), name
    if optimizer is not None:
        assert not optimizer.second_pass_due
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        assert not same(before[0], dict(model.state_dict()))


# ------------------------------------------------------------------ construction


@each_class
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.BatchNorm2d(3)), "no Linear or Conv layer"),
        (nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3)), "no Linear or Conv layer"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), "parametrized"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention"),
    ],
)
def test_a_model_without_a_supported_layer(name: str, model: nn.Module, reason: str) -> None:
    with unchanged(model), pytest.raises(UnsupportedLayerError, match="no layer with a Kronecker block") as error:
        FAMILY[name].make(model, lr=0.1)
    assert reason in str(error.value) and "torch.optim" in str(error.value)


NO_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "list": lambda model: list(model.parameters()),
    "groups": lambda model: [{"params": list(model.parameters()), "lr": 0.1}],
    "class": lambda model: nn.Linear,
    "none": lambda model: None,
    "models": lambda model: [model],
}


def builders(name: str) -> list[Callable[..., Any]]:
    """The row's constructor, and the class with its defaults."""
    member = FAMILY[name]
    made: Any = type(member.make(net(), lr=0.1))
    required = {} if member.has_defaults else {"lr": 0.1}
    return [lambda *args: member.build(*args, **{**member.fixed, **required}), lambda *args: made(*args, **required)]


@each_class
@pytest.mark.parametrize("which", NO_MODELS)
def test_no_model_in_the_first_place(name: str, which: str) -> None:
    model = net()
    for build in builders(name):
        with unchanged(model), pytest.raises(TypeError, match=r"the model comes first, \w+\(model\), or") as error:
            build(NO_MODELS[which](model))
        assert "parameters alone" in str(error.value)


@each_class
@pytest.mark.parametrize("value", [0.1, 1, np.float32(0.1), torch.tensor(0.1), lambda k: 0.1], ids=lambda v: type(v))
def test_a_rate_in_the_place_of_the_parameters(name: str, value: Any) -> None:
    model = net()
    for build in builders(name):
        with unchanged(model), pytest.raises(TypeError, match=r"`lr` is a keyword: \w+\(model, lr="):
            build(model, value)


@each_class
@pytest.mark.parametrize("part", [False, True])
def test_a_module_in_the_place_of_the_parameters(name: str, part: bool) -> None:
    model = net()
    for build in builders(name):
        with unchanged(model), pytest.raises(TypeError, match=r"module.parameters\(\)\) those of a module in it"):
            build(model, model[3] if part else model)


def test_an_optimizer_that_is_built_of_parameters_alone(tmp_path: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with unchanged(model), pytest.raises(TypeError, match="the model comes first, .*ZeroRedundancyOptimizer"):
            ZeroRedundancyOptimizer(model.parameters(), KBFGS, lr=0.1)
    finally:
        torch.distributed.destroy_process_group()


@each_class
def test_a_model_without_parameters(name: str) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FAMILY[name].make(nn.ReLU(), lr=0.1)


BAD: list[tuple[str, Any]] = [
    *[("damping", value) for value in (0.0, -1.0, float("nan"))],
    *[("lr", value) for value in (-0.1, float("nan"), torch.ones(2))],
    *[("momentum", value) for value in (-0.1, 1.0, float("nan"))],
    *[("weight_decay", value) for value in (-0.1, float("nan"))],
    *[("T", value) for value in (0, -1, 1.5)],
]


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [(row, *bad) for bad in BAD for row in classes() if bad[0] == "T" or FAMILY[row].takes(bad[0])],
    ids=str,
)
def test_a_bad_hyperparameter(row: str, name: str, value: Any) -> None:
    model, member = net(), FAMILY[row]
    with unchanged(model), pytest.raises(ValueError, match=member.T if name == "T" else name):
        member.make(model, **{"lr": 0.1, name: value})


@each_class
@pytest.mark.parametrize(("key", "value"), BAD, ids=str)
def test_a_bad_hyperparameter_of_a_group(name: str, key: str, value: Any) -> None:
    model, key = net(), FAMILY[name].T if key == "T" else key
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), key: value}]
    with unchanged(model), pytest.raises(ValueError, match=key):
        FAMILY[name].make(model, params=groups, lr=0.1)


@each_class
def test_a_bad_reduction(name: str) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="reduction='none'"):
        FAMILY[name].make(model, lr=0.1, reduction="none")


@pytest.mark.parametrize("size", [0, -1, 2.5])
@pytest.mark.parametrize("name", rows(lambda member: member.limited))
def test_a_bad_history_size(name: str, size: Any) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="history_size"):
        FAMILY[name].with_memory(size).make(model, lr=0.1)


@pytest.mark.parametrize(
    "side",
    [
        OmegaInverse,
        GammaInverse,
        MovingInverse,
        FisherInverse,
        MovingHessianAction,
        StepHessianAction,
        FisherAction,
    ],
)
@pytest.mark.parametrize("decay", [1.1, -0.1, float("nan"), lambda k: 1.0 + k, lambda k: None])
def test_a_bad_decay(side: Any, decay: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid decay: .* 0 <= β <= 1"):
        side(decay=decay)


@each_class
def test_parameters_of_another_model(name: str) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="not parameters of the model"):
        FAMILY[name].make(model, params=net().parameters(), lr=0.1)


@each_class
def test_weight_and_bias_in_different_groups(name: str) -> None:
    model = net()
    groups = [{"params": [model[3].weight]}, {"params": [model[3].bias], "lr": 0.2}]
    with unchanged(model), pytest.raises(ValueError, match="Weight and bias of 3 .* 0 and 1 have the lr 0.1 and 0.2"):
        FAMILY[name].make(model, params=groups, lr=0.1)


@each_class
@started
def test_a_bad_group_added_later(name: str, steps: int) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, params=model[0].parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    with unchanged(model, optimizer):
        for group, message in (
            ({"params": list(model[3].parameters()), "damping": 0.0}, "damping"),
            ({"params": list(net().parameters())}, "not parameters of the model"),
            ({"params": [model[0].weight]}, "more than one parameter group"),
        ):
            with pytest.raises(ValueError, match=message):
                optimizer.add_param_group(group)
            assert len(optimizer.param_groups) == 1


# ------------------------------------------------------------------ steps


@with_closures
@started
def test_a_closure_that_runs_no_backward(name: str, steps: int) -> None:
    model, optimizer = make(name, steps)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="backward"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y))


@each
@started
def test_a_first_phase_that_runs_no_backward(name: str, steps: int) -> None:
    model, optimizer = make(name, steps)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="backward"):
        optimizer.zero_grad()
        with optimizer.first_pass():
            F.cross_entropy(model(X), Y)
        optimizer.step()


@pytest.mark.parametrize("name", one_per(kind, rows(lambda member: member.passes == 2)))  # one pass measures itself
def test_step_without_anything_measured(name: str) -> None:
    model, optimizer = make(name, 0)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="first_pass"):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def per_datum(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


@each
@started
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (per_datum, r"shape \[8\]"),
        (lambda output, y: F.cross_entropy(output, y).reshape(1), r"shape \[1\]"),
        (lambda output, y: F.cross_entropy(output, y).item(), "type float"),
        (lambda output, y: None, "type NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar(name: str, steps: int, loss: Callable[..., Any], found: str) -> None:
    model, optimizer = make(name, steps)
    with unchanged(model, optimizer), pytest.raises(ValueError, match=found):
        optimizer.step(Minibatch(model, loss, X, Y))


@with_closures
@started
def test_a_closure_whose_loss_is_no_scalar(name: str, steps: int) -> None:
    model, optimizer = make(name, steps)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = per_datum(model(X), Y)
        loss.backward()
        return loss

    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="scalar"):
        optimizer.step(evaluate)


@each
@started
def test_an_empty_minibatch(name: str, steps: int) -> None:
    model, optimizer = make(name, steps)
    with unchanged(model, optimizer), pytest.raises(ValueError, match="no datum"):
        optimizer.step(Minibatch(model, F.cross_entropy, X[:0], Y[:0]))


@pytest.mark.parametrize(
    "model", [net(), nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())]
)
@with_closures
@started
def test_an_empty_batch_in_a_closure(name: str, steps: int, model: nn.Module) -> None:
    model, optimizer = make(name, steps, copy.deepcopy(model))

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = model(X[:0]).square().sum()  # finite, with gradients that are zero
        loss.backward()
        return loss

    with unchanged(model, optimizer), pytest.raises((ValueError, RuntimeError), match=r"(?i)empty|no datum|no data"):
        optimizer.step(evaluate)


@each
def test_an_error_in_the_model_passes_through(name: str) -> None:
    model, optimizer = make(name, 1)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="expected input"):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.rand(8, 2, 4, 4), Y))


@each
@pytest.mark.parametrize("loader", [[], iter([])], ids=["list", "iterator"])
def test_a_warm_start_without_data(name: str, loader: Any) -> None:
    model, optimizer = make(name, 0)
    with unchanged(model, optimizer), pytest.raises(ValueError, match="no batch"):
        forward = None if FAMILY[name].starts_from_inputs else lambda batch: None
        optimizer.warm_start(loader, forward, progress=False)


@pytest.mark.parametrize("name", rows(lambda member: not member.starts_from_inputs))
def test_a_warm_start_without_the_backward_pass_that_it_needs(name: str) -> None:
    model, optimizer = make(name, 0)
    with unchanged(model, optimizer), pytest.raises(ValueError, match="needs gradients. Pass forward="):
        optimizer.warm_start([X], progress=False)


def test_quantities_before_backward() -> None:
    model, _ = make("KBFGS", 0)
    ext = KBFGSQuantities()
    with unchanged(model), pytest.raises(MissingQuantitiesError, match="backward pass"):
        ext[model[0]]


@each_class
@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied_without_its_model(name: str, trip: Callable[[Any], Any]) -> None:
    """Rather than giving a copy that fails at its first step."""
    model, optimizer = make(name, 1)
    with unchanged(model, optimizer), pytest.raises(TypeError, match="state_dict"):
        trip(optimizer)


@each
def test_loading_the_state_of_another_model(name: str) -> None:
    model, optimizer = make(name, 2)
    _, other = make(name, 0, nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with unchanged(model, optimizer), pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(other.state_dict())


# ------------------------------------------------------------------ a model that BackPACK has extended


@each_class
def test_a_model_that_backpack_has_extended(name: str) -> None:
    """Its hooks would take the place of ours: said when the optimizer is built, and the way out is one."""
    model, twin = backpack.extend(net()), net()
    twin.load_state_dict(model.state_dict())
    with unchanged(model), pytest.raises(ValueError, match=r"layers 0, 3\b.*kfqn_ext.unextend\(model\)"):
        make(name, 0, model)
    for trained in (kfqn_ext.unextend(model), twin):
        torch.manual_seed(0)  # of targets that are sampled
        make(name, 2, trained)
    assert hooks(model) == hooks(twin)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@each_class
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("announced", [False, True])
def test_a_model_that_backpack_extends_later(name: str, steps: int, announced: bool) -> None:
    """Before a pass, or before the step where no pass is announced."""
    model, optimizer = make(name, steps)
    optimizer.zero_grad()
    backpack.extend(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="layers 0, 3"):
        if announced:
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        else:
            with nullcontext() if optimizer.recipe.second_pass is SecondPass.NONE else optimizer.first_pass():
                F.cross_entropy(model(X), Y).backward()
            optimizer.step()
    assert same(model.state_dict(), before)
    kfqn_ext.extend(kfqn_ext.unextend(model))
    optimizer.zero_grad()
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    assert not same(model.state_dict(), before)


def test_layers_that_are_added_later() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = KBFGS(model, model[3].parameters(), lr=0.1, damping=1.0)
    backpack.extend(model[0].requires_grad_(True))
    with pytest.raises(ValueError, match=r"\(layers 0\)"):
        optimizer.add_param_group({"params": model[0].parameters()})
    assert len(optimizer.param_groups) == 1
