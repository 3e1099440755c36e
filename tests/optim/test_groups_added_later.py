"""``add_param_group`` in the middle of training: what was known of the layers stays known, and new ones are learned."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, classes, rows

COMMON: dict[str, Any] = {"lr": 0.01, "damping": 1.0}
X, Y = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


class Net(nn.Module):
    """A convolution before BatchNorm, and a last layer that is added to the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear, self.last = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Linear(64, 3),
            nn.Linear(3, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(torch.relu(self.norm(self.conv(x))).flatten(1)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize(
    "name", rows(lambda member: member.secant_G and member.action_A and member.takes("second_pass_fraction"))
)
def test_layers_before_a_normalization_go_on_learning(name: str, share: float) -> None:
    """As in the run without the new group: the same pairs for H_A, from the same part of the minibatch."""
    seen, spared, learned = [], [], FAMILY[name].learned_A
    for add in (False, True):
        model = net()
        rest = [p for of, p in model.named_parameters() if not of.startswith("last")]
        optimizer = FAMILY[name].make(model, params=rest, second_pass_fraction=share, **COMMON)
        for _ in range(2):
            step(model, optimizer)
        before = optimizer.state[model.conv.weight][learned].clone()
        if add:
            optimizer.add_param_group({"params": list(model.last.parameters())})
        for _ in range(2):
            step(model, optimizer)
        assert not torch.equal(optimizer.state[model.conv.weight][learned], before)
        seen.append([optimizer.state[model.conv.weight][f"pairs_seen_{side}"].tolist() for side in "AG"])
        spared.append(optimizer._preconditioner.normalized._spared == {model.conv})
    assert spared == [True, True]
    assert seen[0] == seen[1] == [[FAMILY[name].pairs_of_A(4), 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("how", ["list", "generator", "one by one"])
def test_new_layers_need_neither_names_nor_extending(name: str, how: str) -> None:
    """The optimizer was built on all named parameters; the layer comes after that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh())
    optimizer = FAMILY[name].make(model, **COMMON)
    new = model.append(nn.Linear(4, 3))[3]
    if how == "one by one":
        optimizer.add_param_group({"params": new.weight})
    else:
        optimizer.add_param_group({"params": list(new.parameters()) if how == "list" else new.parameters()})
    assert optimizer.param_groups[1]["param_names"][0] == "3.weight"
    before = new.weight.detach().clone()
    step(model, optimizer)
    assert FAMILY[name].learned_A in optimizer.state[new.weight] and not torch.equal(new.weight, before)


def test_named_parameters_and_sets_are_torch_s_business() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, model.linear.named_parameters("linear"), **COMMON)
    optimizer.add_param_group({"params": model.last.named_parameters("last")})
    assert optimizer.param_groups[1]["param_names"] == ["last.weight", "last.bias"]
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": set(model.conv.parameters())})
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert len(optimizer.param_groups) == 2


# ------------------------------------------------------------------ parameters that the model has lost


class TwoHeads(nn.Module):
    """A trunk under one of two heads; where a head is replaced, the other one is gone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.Tanh())
        self.head: nn.Module = nn.Linear(8, 3)
        self.other: nn.Module | None = nn.Linear(8, 3)

    def switch(self, replace: bool) -> nn.Module:
        self.head, self.other = self.other, None if replace else self.head
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@pytest.mark.parametrize("name", FAMILY)
def test_a_head_that_is_replaced(name: str) -> None:
    """The run is that of a model which keeps the old head, and does not use it."""
    finals = []
    for replace in (True, False):
        model = TwoHeads()
        old = [*model.head.parameters()]
        optimizer = FAMILY[name].make(model, params=[*model.trunk.parameters(), *old], **COMMON)
        for k in range(6):
            if k == 3:
                optimizer.add_param_group({"params": model.switch(replace).parameters()})
                kept = [p.detach().clone() for p in old]
            torch.manual_seed(k)  # of sampled targets
            step(model, optimizer)
        assert all(torch.equal(p, q) for p, q in zip(old, kept, strict=True))
        finals.append([*model.trunk.parameters(), *model.head.parameters()])
        if replace:
            assert all(p.grad is None and p not in optimizer.state for p in old)
            assert repr(optimizer).count("the model has it no longer") == 2
            assert f" of {sum(p.numel() for p in model.parameters())} parameters" in repr(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            step(model, optimizer)
        else:
            step(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(*finals, strict=True))


def test_strangers_are_still_refused() -> None:
    model = TwoHeads()
    gone = [*model.head.parameters()]
    optimizer = KBFGS(model, [*model.trunk.parameters()])
    model.switch(replace=True)
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.add_param_group({"params": gone})


def test_a_model_that_has_lost_its_last_layer() -> None:
    model = nn.Sequential(nn.Linear(36, 3))
    optimizer = KBFGS(model)
    model[0] = nn.BatchNorm1d(36)
    with pytest.raises(UnsupportedLayerError, match="no layer with a Kronecker block .*0.weight: the model has it no"):
        optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups) == 1


def assigned(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def one_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, 8))


def one_norm(model: Any) -> None:
    model.trunk[2].bias = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("name", classes())
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("change", "named"),
    [(assigned, "trunk.1.weight, .* and 5 more"), (one_weight, "head.weight"), (one_norm, "trunk.2.bias")],
)
def test_parameters_that_are_replaced_behind_the_optimizer(name: str, steps: int, change: Any, named: str) -> None:
    """Said before anything has moved, with the way out; which then works."""
    model = TwoHeads()
    optimizer = FAMILY[name].make(model, **COMMON)
    for _ in range(steps):
        step(model, optimizer)
    old = [(p, p.detach().clone()) for p in model.parameters()]
    change(model)
    new = [p for p in model.parameters() if all(p is not q for q, _ in old)]
    with pytest.raises(RuntimeError, match=f"new parameters in the places of {named}.*assign=True.*add_param_group"):
        step(model, optimizer)
    with pytest.raises(RuntimeError, match="new parameters in the places"), optimizer.first_pass():
        F.cross_entropy(model(X), Y).backward()
    if FAMILY[name].passes == 1:
        with pytest.raises(RuntimeError, match="new parameters in the places"):
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in old)
    optimizer.add_param_group({"params": new})
    before = [p.detach().clone() for p in new]
    step(model, optimizer)
    for p, q in zip(new, before, strict=True):
        assert torch.equal(p, q) == any(p is r for r in model.other.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.parametrizations.weight_norm(model.head),
        lambda model: model.head.register_parameter("bias", None),
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(3), requires_grad=False)),
        lambda model: setattr(model.other, "weight", model.head.weight),
    ],
    ids=["reparametrized", "without a bias", "a frozen one", "tied"],
)
def test_other_changes_are_the_users_business(change: Any) -> None:
    model = TwoHeads()
    optimizer = KBFGS(model, **COMMON)
    step(model, optimizer)
    change(model)
    optimizer._begin()


def test_a_layer_that_is_tied_later_is_one_no_more() -> None:
    """Its momentum was that of a matrix with its bias."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    optimizer = KBFGS(model, [*model[1].parameters(), *model[2].parameters(), *model[3].parameters()], **COMMON)
    step(model, optimizer)
    model[3].weight = model[2].weight
    optimizer.add_param_group({"params": model[4].parameters()})
    step(model, optimizer)
    assert "belongs to several modules" in repr(optimizer) and "H_A" not in optimizer.state[model[2].weight]
