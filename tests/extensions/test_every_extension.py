"""What all extensions of the package have in common, and what one that reads the inputs alone leaves out."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import nn

from kfqn_ext.extensions import (
    FactorTraces,
    FisherProducts,
    InputGram,
    InputQuantities,
    InputTraces,
    KBFGSQuantities,
    KFACFactors,
    extend,
)
from tests.cases import IGNORE_EVEN_SAME, Case, every_case

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
EXTENSIONS: list[Any] = [
    FactorTraces,
    FisherProducts,
    InputGram,
    InputQuantities,
    InputTraces,
    KBFGSQuantities,
    KFACFactors,
]
every_extension = pytest.mark.parametrize("make", EXTENSIONS)


@every_extension
def test_they_are_made_alike(make: Any) -> None:
    a, b = extend(nn.Linear(3, 2, dtype=F64)), extend(nn.Linear(2, 2, dtype=F64))
    ext = make(reduction="sum", subsampling=[0, 2], accumulate=True, modules=[a])
    for _ in range(2):
        with backpack(ext):
            b(a(torch.randn(4, 3, dtype=F64))).square().sum().backward()
    assert ext[a].num_data == 4 and b not in ext
    assert getattr(a.weight, make.savefield) is ext[a]
    assert not hasattr(b.weight, make.savefield)


@every_extension
def test_a_wrong_reduction_is_named(make: Any) -> None:
    with pytest.raises(ValueError, match="reduction='none'"):
        make(reduction="none")


@every_extension
def test_a_result_is_printed_on_one_line(make: Any) -> None:
    layer, ext = extend(nn.Conv2d(4, 6, 3, groups=2)), make()
    with backpack(ext):
        layer(torch.rand(8, 4, 6, 6)).sum().backward()
    text = repr(ext[layer])
    assert text.startswith(type(ext[layer]).__name__) and "num_data=8, num_locations=16" in text
    assert "\n" not in text and "tensor" not in text and len(text) < 200


def test_shapes_are_what_is_printed() -> None:
    layer, moments, factors = extend(nn.Conv2d(1, 4, 3)), KBFGSQuantities(), KFACFactors()
    with backpack(moments, factors):
        layer(torch.rand(8, 1, 6, 6)).sum().backward()
    assert repr(moments[layer].A) == "GramOperator([10, 10] of [8, 1, 6, 6])"
    assert repr(moments[layer]) == (
        "LayerMoments(a_bar=[10], num_data=8, num_locations=16, operator=GramOperator([10, 10] of [8, 1, 6, 6]), "
        "s=None, A_s=None, kept=None, h_bar=[4], dh_bar=[4], dh_noise=[4])"
    )
    assert repr(factors[layer]) == "KroneckerFactors(Omega=[10, 10], Gamma=[4, 4], num_data=8, num_locations=16)"


def test_those_that_two_passes_compare_are_measured_in_part() -> None:
    assert [make for make in EXTENSIONS if make.in_part] == [InputQuantities, KBFGSQuantities]


# ------------------------------------------------------------------ the inputs alone


@every_case
def test_the_inputs_alone_give_the_input_side(case: Case) -> None:
    """Whatever the output's gradient is."""
    layer, x = extend(case.layer()), case.input()
    both, alone = KBFGSQuantities(), InputQuantities()
    probed = InputQuantities(probe=lambda module, a_bar: a_bar + 1)
    with backpack(both):
        layer(x).sum().backward()
    with backpack(alone, probed):
        h = layer(x)
        h.backward(torch.full_like(h, torch.nan))
    q, found, p = both[layer], alone[layer], probed[layer]
    assert layer.weight.input_moments is p
    assert torch.equal(found.a_bar, q.a_bar) and torch.equal(found.A @ q.a_bar, q.A @ q.a_bar)
    assert (found.num_data, found.num_locations) == (q.num_data, q.num_locations)
    assert p.operator is None and torch.equal(p.s, q.a_bar + 1) and torch.equal(p.A_s, q.A @ p.s)
    assert isinstance(q, type(found)) and not hasattr(found, "dh_bar")


@every_case
def test_the_trace_of_A_alone_is_that_of_both(case: Case) -> None:
    layer, x, both, alone = extend(case.layer()), case.input(), FactorTraces(), InputTraces()
    with backpack(both):
        layer(x).sum().backward()
    with backpack(alone):
        h = layer(x)
        h.backward(torch.full_like(h, torch.nan))
    assert torch.equal(alone[layer].A, both[layer].A) and not hasattr(alone[layer], "G")
    assert isinstance(both[layer], type(alone[layer]))


def test_a_second_loss_tells_the_inputs_nothing_new() -> None:
    layer, alone, trace = extend(nn.Linear(3, 2)), InputQuantities(accumulate=True), InputTraces(accumulate=True)
    with backpack(alone, trace):
        h = layer(torch.randn(4, 3))
        h.sum().backward(retain_graph=True)
        first, trace_of_first = alone[layer], trace[layer]
        h.sin().sum().backward()
    assert alone[layer] is first and first.num_data == 4
    assert trace[layer] is trace_of_first and trace_of_first.num_data == 4
