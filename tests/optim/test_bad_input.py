"""Bad input gets one clear error, and leaves the model and the optimizer as they were."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.errors import MissingQuantitiesError, UnsupportedLayerError
from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import KBFGS, KBFGSL, Minibatch
from kfqn_ext.optim.inverses import GammaInverse, MovingHessianAction, OmegaInverse

both = pytest.mark.parametrize("cls", [KBFGS, KBFGSL])
started = pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
X, Y = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]


def make(cls: Any, steps: int, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = net() if model is None else model
    optimizer = cls(model, lr=0.1, damping=1.0, curvature_update_freq=1)
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


@both
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.BatchNorm2d(3)), "no Linear or Conv layer"),
        (nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3)), "no Linear or Conv layer"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), "parametrized"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention"),
    ],
)
def test_a_model_without_a_supported_layer(cls: Any, model: nn.Module, reason: str) -> None:
    with unchanged(model), pytest.raises(UnsupportedLayerError, match="no layer with a Kronecker block") as error:
        cls(model, lr=0.1, damping=1.0)
    assert reason in str(error.value) and "torch.optim" in str(error.value)


@both
def test_a_model_without_parameters(cls: Any) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        cls(nn.ReLU(), lr=0.1, damping=1.0)


BAD: list[tuple[str, Any]] = [
    *[("damping", value) for value in (0.0, -1.0, float("nan"))],
    *[("lr", value) for value in (-0.1, float("nan"), torch.ones(2))],
    *[("momentum", value) for value in (-0.1, 1.0, float("nan"))],
    *[("weight_decay", value) for value in (-0.1, float("nan"))],
    *[("curvature_update_freq", value) for value in (0, -1, 1.5)],
]


@both
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_hyperparameter(cls: Any, name: str, value: Any) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match=name):
        cls(model, **{name: value})


@both
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_hyperparameter_of_a_group(cls: Any, name: str, value: Any) -> None:
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), name: value}]
    with unchanged(model), pytest.raises(ValueError, match=name):
        cls(model, groups, lr=0.1, damping=1.0)


@both
def test_a_bad_reduction(cls: Any) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="reduction='none'"):
        cls(model, reduction="none")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_bad_history_size(size: Any) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="history_size"):
        KBFGSL(model, history_size=size)


@pytest.mark.parametrize("side", [OmegaInverse, GammaInverse, MovingHessianAction])
@pytest.mark.parametrize("decay", [1.1, -0.1, float("nan"), lambda k: 1.0 + k, lambda k: None])
def test_a_bad_decay(side: Any, decay: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid decay: .* 0 <= β <= 1"):
        side(decay=decay)


@both
def test_parameters_of_another_model(cls: Any) -> None:
    model = net()
    with unchanged(model), pytest.raises(ValueError, match="not parameters of the model"):
        cls(model, net().parameters(), lr=0.1, damping=1.0)


@both
def test_weight_and_bias_in_different_groups(cls: Any) -> None:
    model = net()
    groups = [{"params": [model[3].weight]}, {"params": [model[3].bias]}]
    with unchanged(model), pytest.raises(ValueError, match="Weight and bias of 3 are in different parameter groups"):
        cls(model, groups, lr=0.1, damping=1.0)


@both
@started
def test_a_bad_group_added_later(cls: Any, steps: int) -> None:
    model = net()
    optimizer = cls(model, model[0].parameters(), lr=0.1, damping=1.0, curvature_update_freq=1)
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


@both
@started
def test_a_closure_that_runs_no_backward(cls: Any, steps: int) -> None:
    model, optimizer = make(cls, steps)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="backward"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y))


@both
@started
def test_a_first_phase_that_runs_no_backward(cls: Any, steps: int) -> None:
    model, optimizer = make(cls, steps)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="backward"):
        optimizer.zero_grad()
        with optimizer.first_pass():
            F.cross_entropy(model(X), Y)
        optimizer.step()


@both
def test_step_without_anything_measured(cls: Any) -> None:
    model, optimizer = make(cls, 0)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="first_pass"):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def per_datum(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


@both
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
def test_a_loss_that_is_no_scalar(cls: Any, steps: int, loss: Callable[..., Any], found: str) -> None:
    model, optimizer = make(cls, steps)
    with unchanged(model, optimizer), pytest.raises(ValueError, match=found):
        optimizer.step(Minibatch(model, loss, X, Y))


@both
@started
def test_a_closure_whose_loss_is_no_scalar(cls: Any, steps: int) -> None:
    model, optimizer = make(cls, steps)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = per_datum(model(X), Y)
        loss.backward()
        return loss

    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="scalar"):
        optimizer.step(evaluate)


@both
@started
def test_an_empty_minibatch(cls: Any, steps: int) -> None:
    model, optimizer = make(cls, steps)
    with unchanged(model, optimizer), pytest.raises(ValueError, match="no datum"):
        optimizer.step(Minibatch(model, F.cross_entropy, X[:0], Y[:0]))


@pytest.mark.parametrize(
    "model", [net(), nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())]
)
@both
@started
def test_an_empty_batch_in_a_closure(cls: Any, steps: int, model: nn.Module) -> None:
    model, optimizer = make(cls, steps, copy.deepcopy(model))

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = model(X[:0]).square().sum()  # finite, with gradients that are zero
        loss.backward()
        return loss

    with unchanged(model, optimizer), pytest.raises((ValueError, RuntimeError), match=r"(?i)empty|no datum|no data"):
        optimizer.step(evaluate)


@both
def test_an_error_in_the_model_passes_through(cls: Any) -> None:
    model, optimizer = make(cls, 1)
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match="expected input"):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.rand(8, 2, 4, 4), Y))


@both
@pytest.mark.parametrize("loader", [[], iter([])], ids=["list", "iterator"])
def test_a_warm_start_without_data(cls: Any, loader: Any) -> None:
    model, optimizer = make(cls, 0)
    with unchanged(model, optimizer), pytest.raises(ValueError, match="no batch"):
        optimizer.warm_start(loader, progress=False)


def test_quantities_before_backward() -> None:
    model, _ = make(KBFGS, 0)
    ext = KBFGSQuantities()
    with unchanged(model), pytest.raises(MissingQuantitiesError, match="backward pass"):
        ext[model[0]]


@both
@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied_without_its_model(cls: Any, trip: Callable[[Any], Any]) -> None:
    """Rather than giving a copy that fails at its first step."""
    model, optimizer = make(cls, 1)
    with unchanged(model, optimizer), pytest.raises(TypeError, match="state_dict"):
        trip(optimizer)


@both
def test_loading_the_state_of_another_model(cls: Any) -> None:
    model, optimizer = make(cls, 2)
    _, other = make(cls, 0, nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with unchanged(model, optimizer), pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(other.state_dict())
