"""Layers that learn together learn what each learns alone, and keep to their kin."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, KroneckerOptimizer, Minibatch
from kfqn_ext.optim.inverses import SecantBFGS, Seen, State
from kfqn_ext.optim.inverses.lbfgs import start_pairs, update_pairs
from kfqn_ext.optim.preconditioner import block as blocks
from tests.cases import assert_close
from tests.optim.family import FAMILY


class Cast(nn.Module):
    """To another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def net() -> nn.Sequential:
    """Layers of two dtypes and several sizes, and with the same and with other groups."""
    torch.manual_seed(0)
    return nn.Sequential(
        Cast(torch.float64),
        nn.Conv2d(2, 4, 3, padding=1).double(),
        nn.BatchNorm2d(4).double(),  # the layer before it needs no output side, and others of its kin do
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2).double(),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, groups=2).double(),
        nn.Tanh(),
        nn.Conv2d(4, 8, 1, groups=2).double(),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False).double(),
        nn.Tanh(),
        nn.Conv2d(8, 2, 1).double(),
        nn.Flatten(),
        Cast(torch.float32),
        nn.Linear(32, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    )


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def run(name: str) -> tuple[list[Any], KroneckerOptimizer]:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    for _ in range(5):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(9, 2, 6, 6), torch.arange(9) % 3))
    return layers(model), optimizer


@pytest.mark.parametrize("name", FAMILY)
def test_together_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, optimizer = run(name)
    monkeypatch.setattr(blocks, "kin", lambda layer: layer)
    alone, other = run(name)
    for one, two in zip(together, alone, strict=True):
        got, want = optimizer.state[one.weight], other.state[two.weight]
        assert got.keys() == want.keys()
        for key, value in got.items():
            assert value.shape == want[key].shape and value.dtype == want[key].dtype
            assert value.untyped_storage().nbytes() == value.nbytes  # or a checkpoint would hold others' memory
            assert_close(value, want[key], 1e-4)  # two layers, and all gradients with them, are in float32
        for key in got.keys() & {"pairs_seen_A", "pairs_seen_G"}:
            before_norm = one is together[0]  # where Δ∂h̄ says nothing, and Γ does
            assert got[key][0].all() == (key == "pairs_seen_A" or not before_norm or FAMILY[name].action_G)


class OnePass(SecantBFGS):
    """Learns in the first pass, as convolutions before BatchNorm do, and shows it."""

    second: ClassVar[tuple[Any, ...]] = ()

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        for state in states:
            state["H_G"] *= 2.0


def test_each_by_its_own_recipe() -> None:
    """Layers of one kin and one pass, of which one needs no output side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    recipe = replace(KBFGS.recipe_as_printed, output_inverse=OnePass())
    optimizer = KroneckerOptimizer(model, recipe=recipe, lr=0.05, damping=0.5)
    traces = []
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(9, 2, 6, 6), torch.arange(9) % 3))
        traces.append([float(optimizer.state[layer.weight]["H_G"].trace()) for layer in layers(model)])
    (before, other_before), _, (after, other_after) = traces
    assert after == before and other_after == 4.0 * other_before


def test_pairs_beside_several_identities() -> None:
    """A pair is kept where what it brings can be told from zero beside its own layer's γ."""
    s, gamma = torch.ones(2, 3), torch.tensor([1.0, 1e10])
    states: list[dict[str, Tensor]] = [{}, {}]
    for state, scale in zip(states, gamma, strict=True):
        start_pairs(state, "G", s[0], 2, scale)
    assert update_pairs(states, "G", s, 10 * s, gamma).tolist() == [True, False]


def test_kin() -> None:
    """Vectors of one dtype, and with blocks of one shape: who else is of another kin."""
    optimizer = KBFGS.as_printed(net(), lr=0.05, damping=0.5)
    kin = [blocks.kin(block.layer) for block in optimizer._blocks()]
    assert [kin.index(one) for one in kin] == [0, 1, 1, 3, 4, 0, 6, 6]
