"""``add_param_group`` in the middle of training: what was known of the layers stays known, and new ones are learned."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, rows

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
    assert seen[0] == seen[1] == [[4 * FAMILY[name].directions_A, 0, 0], [0, 0, 0]]


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
