"""A complex parameter moves as its real and imaginary parts do, and an empty layer changes nothing."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from tests.cases import assert_close
from tests.optim.family import FAMILY, classes, one_per, rows

F64 = torch.float64
X, Y = torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Net(nn.Module):
    """With a complex parameter, or the same as pairs of numbers."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        z = torch.randn(5, 2, dtype=F64)
        self.z = nn.Parameter(torch.view_as_complex(z) if is_complex else z)

    def forward(self, x: Tensor) -> Tensor:
        z = self.z if self.z.is_complex() else torch.view_as_complex(self.z)
        return self.last((self.first(x) * z + z.conj()).abs())


def targets(output: Tensor, *unused: Any) -> Tensor:
    return output.detach().argmin(dim=1)


def train(model: nn.Module, optimizer: Any, steps: int, factor: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.step(Minibatch(model, lambda z, y: factor * F.cross_entropy(z, y), X, Y, targets))


def same(model: Net, twin: Net) -> bool:
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.equal(torch.view_as_real(p) if p.is_complex() else p, q) for p, q in pairs)


@pytest.mark.parametrize("option", [{}, {"weight_decay": 0.1}, {"step_cap": 1e-3}, {"direction_dtype": torch.bfloat16}])
@pytest.mark.parametrize("name", FAMILY)
def test_it_moves_as_pairs_of_numbers(name: str, option: dict[str, Any]) -> None:
    """Bit for bit, with a batch that is not finite among the others; the cap is active."""
    if not FAMILY[name].takes(*option):
        return
    model, twin, free = Net(True), Net(False), Net(True)
    optimizers = [FAMILY[name].make(m, lr=0.05, **option) for m in (model, twin)]
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        train(m, optimizer, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(m, optimizer, 1, float("nan"))
        train(m, optimizer, 2)
    assert same(model, twin) and not torch.equal(model.z, free.z)
    if "step_cap" in option:
        train(free, FAMILY[name].make(free, lr=0.05), 5)
        assert not torch.equal(model.z, free.z)


@pytest.mark.parametrize("name", one_per(lambda member: type(member.recipe.others), rows(lambda member: True)))
def test_it_moves_as_in_torch(name: str) -> None:
    """By AdamW, or by SGD with momentum at the rate of the paper."""
    model, member = Net(True), FAMILY[name]
    optimizer = member.make(model, lr=0.05, damping=0.5, **member.taken(momentum=0.7))
    z = nn.Parameter(model.z.detach().clone())
    if member.others_by_momentum:
        rate = member.recipe.others.rate(0.05, 0.5)
        theirs: Any = torch.optim.SGD([z], lr=rate, momentum=optimizer.param_groups[0]["momentum"])
    else:
        theirs = torch.optim.AdamW([z], lr=0.05 * member.recipe.others.ratio, betas=(0.7, 0.999), weight_decay=0.0)
    for _ in range(10):
        train(model, optimizer, 1)
        z.grad = model.z.grad.clone()
        theirs.step()
        torch.testing.assert_close(model.z, z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", classes())
def test_its_state_is_saved_and_cast(name: str) -> None:
    model = Net(True)
    optimizer = FAMILY[name].make(model, lr=0.05)
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    other = FAMILY[name].make(twin, lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    low = Net(True)
    low.z = nn.Parameter(low.z.detach().to(torch.complex64))
    other = FAMILY[name].make(low, lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    kept = {key: value.dtype for key, value in other.state[low.z].items()}
    assert kept.pop("momentum") == torch.complex64 and {*kept.values()} <= {torch.float32}


@pytest.mark.parametrize("option", [{}, {"step_cap": 1e-3}])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)], ids=str)
@pytest.mark.parametrize("name", classes())
def test_an_empty_layer_changes_nothing(name: str, shape: tuple[int, int], option: dict[str, Any]) -> None:
    """It has no block; a bias beside a weight without inputs is trained."""

    class WithEmpty(nn.Module):
        def __init__(self, layer: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of initializing nothing
                self.empty = nn.Linear(*shape).double() if layer else nn.Identity()
            if shape[0] == 0 and not layer:
                self.bias = nn.Parameter(torch.zeros(3, dtype=F64))
            elif shape[0] == 0:
                nn.init.zeros_(self.empty.bias)

        def forward(self, x: Tensor) -> Tensor:
            h = self.last(self.first(x).tanh())
            if isinstance(self.empty, nn.Identity):
                return h + self.bias if shape[0] == 0 else h
            e = self.empty(x[:, : shape[0]])
            return h + (e if shape[1] else e.sum(1, keepdim=True))

    if not FAMILY[name].takes(*option):
        return
    model, twin = WithEmpty(True), WithEmpty(False)
    optimizers = [FAMILY[name].make(m, lr=0.05, **option) for m in (model, twin)]
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        train(m, optimizer, 4)
    for layer in ("first", "last"):
        one, other = (m.get_submodule(layer).weight for m in (model, twin))
        assert_close(one.detach(), other.detach(), 1e-13)
    if shape[0] == 0:
        assert_close(model.empty.bias.detach(), twin.bias.detach(), 1e-13)
        assert model.empty.bias.any()
    assert "its weight is empty" in repr(optimizers[0])
    optimizers[0].load_state_dict(optimizers[0].state_dict())
