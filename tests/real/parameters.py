"""Parameters and inputs as training scripts have them: grouped, replaced, loaded, complex, several at once."""

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.optim import KBFGS, KFAC, Minibatch, OnePassKBFGS

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def net(order: str = "ab") -> Any:
    layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in order})
    layers.add_module("head", nn.Linear(6, 3))
    for name, p in layers.named_parameters():
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    layers.forward = lambda x: layers["head"](torch.tanh(layers["b"](torch.tanh(layers["a"](x)))))  # type: ignore[method-assign]
    return layers


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


def same(model: nn.Module, twin: nn.Module) -> bool:
    return all(torch.equal(p, twin.get_parameter(name)) for name, p in model.named_parameters())


def decay_of_weights_alone() -> None:
    """Without decay, groups by dimension are one group; with it, a first step moves biases as without it."""
    finals = []
    for decay in (0.0, 0.5):
        model = net()
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
        train(model, KBFGS(model, [{"params": matrices, "weight_decay": decay}, {"params": vectors}]), 1)
        finals.append(model)
    whole = net()
    train(whole, KBFGS(whole), 1)
    assert same(finals[0], whole)
    assert all(torch.equal(p, finals[1].get_parameter(n)) == (p.ndim == 1) for n, p in whole.named_parameters())


def replaced_head() -> None:
    model = net()
    optimizer, old = KBFGS(model), model["head"].weight
    train(model, optimizer)
    before = old.detach().clone()
    model["head"] = nn.Linear(6, 3)
    optimizer.add_param_group({"params": model["head"].parameters()})
    train(model, optimizer)
    assert torch.equal(old, before) and "H_A" in optimizer.state[model["head"].weight]


def assigned_parameters() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    model.load_state_dict(net().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"new parameters in the places of a.weight, .*assign=True"):
        train(model, optimizer)


def another_order() -> None:
    model, twin = net("ab"), net("ba")
    optimizer, other = KBFGS(model), KBFGS(twin)
    train(model, optimizer)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)


def loading_hooks() -> None:
    """A state of a wrapped model, whose names a hook cuts."""
    model, twin = net(), net()
    optimizer, other = KBFGS(model), KBFGS(twin)
    train(model, optimizer)
    twin.load_state_dict(model.state_dict())
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    with pytest.raises(ValueError, match="lacks a.bias.*it has module.a.bias.*rename them"):
        other.load_state_dict(state)

    def cut(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        names = [name.removeprefix("module.") for name in given["param_groups"][0]["param_names"]]
        return {**given, "param_groups": [{**given["param_groups"][0], "param_names": names}]}

    other.register_load_state_dict_pre_hook(cut)
    other.load_state_dict(state)
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)


def several_inputs() -> None:
    """In order and by name, with outputs in a dictionary, for KFAC with a sampler of one's own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"logits": self.a(left) + self.b(right).tanh()}

    def loss(output: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], y)

    def sample(output: Any, y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.multinomial(output["logits"].softmax(1), 1, generator=generator)[:, 0]

    finals = []
    for x in ((X, -X), {"right": -X, "left": X}, UserDict(left=X, right=-X)):
        model = Two()
        optimizer = KFAC(model, second_pass_fraction=0.5)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.step(Minibatch(model, loss, x, Y, sample))
        finals.append(model)
    assert same(finals[0], finals[1]) and same(finals[0], finals[2])


def nested_tensors() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = OnePassKBFGS(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that they are a prototype
        for layout in (torch.jagged, torch.strided):
            x = torch.nested.nested_tensor([X[:2], X[2:]], layout=layout)
            with torch.no_grad():
                assert model(x).is_nested
            with pytest.raises(UnsupportedLayerError, match="nested tensor.*to_padded_tensor"):
                torch.nested.to_padded_tensor(model(x), 0.0).sum().backward()
    model.zero_grad()
    train(model, optimizer)


def complex_parameters() -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Parameter(torch.ones(6, dtype=torch.complex64))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x * self.z + 1j).abs())

    for build in (KBFGS, lambda model: KBFGS.as_printed(model, step_cap=0.1)):
        model = Phases()
        train(model, build(model))
        assert model.z.is_complex() and model.z.isfinite().all() and bool((model.z != 1).all())
