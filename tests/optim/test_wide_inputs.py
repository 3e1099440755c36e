"""Layers with many inputs learn H_A by another rule than the others: a choice of the row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.geometry.linear import LinearGeometry
from kfqn_ext.optim import KBFGS, KFAC, KroneckerOptimizer, Minibatch, OnePassKBFGS
from kfqn_ext.optim.inverses import HessianActionLBFGS, OmegaInverse
from kfqn_ext.optim.recipe import Recipe, Wide
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.twins import LimitedA

F64 = torch.float64
FEW = Wide(above=6, rule=HessianActionLBFGS(history_size=2))
OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.5, "curvature_update_freq": 1}
BOTH: Any = pytest.mark.parametrize("cls", [KBFGS, OnePassKBFGS])


def net() -> nn.Sequential:
    """Its second layer has seven inputs with the bias, the others fewer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(model: nn.Module, k: int) -> Minibatch:
    x = torch.randn(9, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
    return Minibatch(model, F.cross_entropy, x, torch.arange(9) % 3)


def trained(recipe: Recipe, steps: int = 6) -> tuple[nn.Sequential, Any]:
    model = net()
    optimizer = KroneckerOptimizer(model, recipe=recipe, **OPTIONS)
    for k in range(steps):
        optimizer.step(batch(model, k))
    return model, optimizer


def keys(model: nn.Sequential, optimizer: Any) -> list[str]:
    """What each layer keeps of H_A."""
    return ["+".join(sorted({"H_A", "pairs_A"} & optimizer.state[model[i].weight].keys())) for i in (0, 2, 4)]


class WideA(LimitedA):
    """The dense twin: H_A by L-BFGS where it has more than six rows."""

    def initial(self, layer: ref.Layer, A: Tensor) -> ref.LayerState:
        return super().initial(layer, A) if len(A) > 6 else ref.ReferenceKBFGS.initial(self, layer, A)

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        rule: Callable[..., None] = LimitedA.update_H_A if len(st.H_A) > 6 else ref.ReferenceKBFGS.update_H_A
        rule(self, st, layer)


@pytest.mark.parametrize("pairs", [2, 4])  # four are more than half of the inputs: H_A is formed from them
def test_eight_steps_equal_the_reference(pairs: int) -> None:
    model, twin = net(), net()
    recipe = replace(KBFGS.recipe_as_printed, wide=Wide(6, HessianActionLBFGS(pairs)))
    optimizer = KroneckerOptimizer(model, recipe=recipe, **OPTIONS)
    reference = WideA(twin, F.cross_entropy, 0.1, 0.5, memory_A=pairs)
    for k in range(8):
        optimizer.step(batch(model, k))
        reference.step(batch(twin, k).x, batch(twin, k).y)
    for p, want in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_close(p, want, 1e-10)
    for name, st in reference.state.items():
        held = optimizer.inverses(model.get_submodule(name).weight)
        assert held is not None
        for H, want in zip(held.dense(), (st.H_A, st.H_G), strict=True):
            assert_close(H, want, 1e-10)


@BOTH
def test_between_its_two_rules(cls: Any) -> None:
    """All layers by the one, or all by the other, where the limit says so: to the last bit."""
    for wide, same in (
        (Wide(7, FEW.rule), cls.recipe),
        (Wide(1, FEW.rule), replace(cls.recipe, input_inverse=FEW.rule)),
    ):
        (model, optimizer), (twin, other) = trained(replace(cls.recipe, wide=wide)), trained(same)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        assert keys(model, optimizer) == keys(twin, other)


@BOTH
def test_wide_layers_form_no_A(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the start nor in a warm start."""
    seen, gram = [], LinearGeometry.gram
    monkeypatch.setattr(LinearGeometry, "gram", lambda self, x: (seen.append(self.d_in), gram(self, x))[1])
    model = net()
    optimizer = KroneckerOptimizer(model, recipe=replace(cls.recipe, wide=FEW), **OPTIONS)
    optimizer.step(batch(model, 0))
    assert sorted(seen) == [5, 6]
    optimizer.warm_start([batch(model, 1)], progress=False)
    optimizer.step(batch(model, 2))
    assert sorted(seen) == [5, 5, 6, 6]
    assert keys(model, optimizer) == ["H_A", "pairs_A", "H_A"]
    assert all(d.A is not None and d.A.kept > 0 for d in optimizer.diagnostics())


@BOTH
def test_a_loaded_state_goes_on_bit_for_bit(cls: Any) -> None:
    recipe = replace(cls.recipe, wide=FEW)
    model, optimizer = trained(recipe)
    resumed = net()
    resumed.load_state_dict(model.state_dict())
    other = KroneckerOptimizer(resumed, recipe=recipe, **OPTIONS)
    other.load_state_dict(optimizer.state_dict())
    for k in range(6, 9):
        optimizer.step(batch(model, k))
        other.step(batch(resumed, k))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("wide", [None, Wide(5, FEW.rule)])
def test_a_state_with_another_limit_is_refused(wide: Wide | None) -> None:
    saved = trained(replace(KBFGS.recipe, wide=FEW), 1)[1].state_dict()
    other = KroneckerOptimizer(net(), recipe=replace(KBFGS.recipe, wide=wide), **OPTIONS)
    with pytest.raises(ValueError, match="layout .*above 6"):
        other.load_state_dict(saved)


def test_what_can_be_no_such_choice() -> None:
    with pytest.raises(ValueError, match="Invalid above: 0"):
        Wide(above=0)
    with pytest.raises(ValueError, match="OmegaInverse learns from a second pass"):
        Wide(rule=OmegaInverse())
    with pytest.raises(ValueError, match="targets are sampled"):
        replace(KFAC.recipe_stable, wide=Wide())
