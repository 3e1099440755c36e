"""The registry that all suites of the family run over is complete, and every entry trains, shows and saves itself."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfqn_ext.optim
from kfqn_ext.optim import KroneckerOptimizer, Minibatch
from kfqn_ext.optim.groups.hyperparameters import DEFAULTS, Shared
from kfqn_ext.optim.inverses.base import InputInverse, OutputInverse
from tests.cases import assert_close
from tests.optim.family import FAMILY, ONE_PER_CLASS

F64 = torch.float64
CLASSES = [
    value
    for value in vars(kfqn_ext.optim).values()
    if isinstance(value, type) and issubclass(value, KroneckerOptimizer) and value is not KroneckerOptimizer
]


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def test_every_class_has_a_row() -> None:
    assert {type(_optimizer(name)) for name in ONE_PER_CLASS} == set(CLASSES)


def test_every_rule_is_in_a_row() -> None:
    """Of the rules that the package exports: none is left without the suites of the family."""
    recipes = [_optimizer(name).recipe for name in FAMILY]
    used = {type(rule) for recipe in recipes for rule in (recipe.input_inverse, recipe.output_inverse)}
    exported = {getattr(kfqn_ext.optim.inverses, name) for name in kfqn_ext.optim.inverses.__all__}
    rules = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, (InputInverse, OutputInverse))}
    assert rules - {InputInverse, OutputInverse} == used


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(2), nn.Linear(9, 5), nn.Flatten(), nn.Linear(20, 3)
    ).double()


def _optimizer(name: str, model: nn.Module | None = None) -> Any:
    return FAMILY[name].make(_net() if model is None else model, lr=0.05, damping=0.5)


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for k in steps:
        x = torch.randn(9, 2, 5, 5, dtype=F64, generator=torch.Generator().manual_seed(k))
        torch.manual_seed(k)
        losses.append(float(optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(9) % 3))))
    return losses


@pytest.mark.parametrize("name", FAMILY)
def test_what_it_shows_is_what_it_multiplies_with(name: str) -> None:
    """``inverses(weight)``: symmetric, positive definite, and their product with M is the step."""
    model = _net()
    optimizer = _optimizer(name, model)
    _train(model, optimizer, range(4))
    for block in optimizer._blocks():
        held = optimizer.inverses(block.layer.weight)
        H_A, H_G = held.dense()
        M = torch.randn_like(block.state["momentum"])
        assert_close(optimizer._preconditioner.direction(block, M), H_G @ M @ H_A, 1e-12)
        for operator, H in ((held.H_A, H_A), (held.H_G, H_G)):
            assert_close(H, H.mT, 1e-12)
            assert torch.linalg.eigvalsh(H).min() > 0
            v = torch.randn(H.shape[:-1], dtype=F64)
            assert_close(operator @ v, (H @ v.unsqueeze(-1)).squeeze(-1), 1e-12)
        with pytest.raises(ValueError, match="it multiplies"):
            held.H_A @ torch.zeros(3, dtype=F64)
    assert optimizer.inverses(torch.zeros(2)) is None


@pytest.mark.parametrize("name", FAMILY)
def test_it_goes_on_from_a_checkpoint(name: str) -> None:
    model = _net()
    optimizer = _optimizer(name, model)
    _train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = _train(model, optimizer, range(3, 6))
    model = _net()
    optimizer = _optimizer(name, model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert _train(model, optimizer, range(3, 6)) == expected


@pytest.mark.parametrize("name", FAMILY)
def test_nothing_has_curvature_before_the_first_step(name: str) -> None:
    model = _net()
    optimizer = _optimizer(name, model)
    assert all(optimizer.inverses(p) is None for p in model.parameters()) and not optimizer.state


@pytest.mark.parametrize("cls", [*CLASSES, KroneckerOptimizer])
def test_signatures_show_every_keyword(cls: Any) -> None:
    """With its type and its default, in one place for all: no ``**shared`` is left to be guessed."""
    parameters = inspect.signature(cls).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if cls.__name__ == "ProvableKBFGSL":  # the proof is about an algorithm without these
        return
    for name, default in DEFAULTS.items():
        assert parameters[name].default == default
        assert parameters[name].annotation == Shared.__annotations__[name]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_unknown_keyword(cls: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight_dekay'"):
        cls(_net(), lr=0.1, weight_dekay=0.1)


@pytest.mark.parametrize("name", FAMILY)
def test_no_state_but_tensors(name: str) -> None:
    """On the parameter's device, in float32 at least, and each with its own memory."""
    model = _net().float()
    optimizer = _optimizer(name, model)
    x = torch.randn(9, 2, 5, 5)
    optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(9) % 3))
    for state in optimizer.state.values():
        for key, value in state.items():
            assert isinstance(value, Tensor) and value.untyped_storage().nbytes() == value.nbytes, key
            assert value.dtype in (torch.float32, torch.int64), key
