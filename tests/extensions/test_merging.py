"""When results merge, when they are overwritten, and what scaling, subsampling and freezing do to them."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import InputGram, KBFGSQuantities, LayerMoments, extend
from tests.cases import ALL_CASES, IGNORE_EVEN_SAME, Explicit, assert_close

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
# Batched, and one of each kind: a layer with groups, one with locations, …
BATCHED = [c for c in ALL_CASES if len(c.shape) == len(getattr(c.layer(), "kernel_size", ())) + 2 and c.shape[0] > 1][
    ::7
]
some_cases = pytest.mark.parametrize(
    "case", [*BATCHED, *[c for c in ALL_CASES if c.shape in ((7, 5), (7, 2, 3, 5))]], ids=str
)


def same(got: LayerMoments, want: LayerMoments, tol: float = 1e-13) -> None:
    assert (got.num_data, got.num_locations) == (want.num_data, want.num_locations)
    for name in ("a_bar", "h_bar", "dh_bar", "dh_noise"):
        assert_close(getattr(got, name), getattr(want, name), tol)
    if got.operator is not None:
        s = torch.randn_like(want.a_bar)
        assert_close(got.A @ s, want.A @ s, tol)


def curved(h: Tensor) -> Tensor:
    """A loss for each datum."""
    return (h.sin() + h.square()).flatten(1).sum(1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@some_cases
def test_a_layer_used_twice_sees_one_batch(case: Any, reduction: str) -> None:
    layer = extend(case.layer())
    x1, x2 = case.input(), case.input()[:2]
    once, twice, gram1, gram2 = KBFGSQuantities(reduction), KBFGSQuantities(reduction), InputGram(), InputGram()
    with backpack(once, gram1):
        curved(layer(torch.cat((x1, x2)))).mean().backward()
    size = len(x1) + len(x2)
    layer.zero_grad()
    with backpack(twice, gram2):
        ((curved(layer(x1)).sum() + curved(layer(x2)).sum()) / size).backward()
    same(twice[layer], once[layer])
    assert_close(gram2[layer].A, gram1[layer].A, 1e-13)
    assert gram2[layer].num_data == size and gram2[layer].num_locations == gram1[layer].num_locations


def test_three_calls_merge_whatever_their_order() -> None:
    layer = extend(nn.Linear(4, 4, dtype=F64))
    moments, x = KBFGSQuantities(), torch.randn(6, 4, dtype=F64)
    with backpack(moments):
        h1 = layer(x)
        h2 = layer(h1.tanh())
        h3 = layer(h2.tanh())
        curved(h3).mean().backward()
    q = moments[layer]
    inputs = torch.cat((x, h1.tanh(), h2.tanh())).detach()
    assert q.num_data == 18
    Explicit(layer, inputs, torch.zeros_like(inputs)).check(1e-13, a_bar=q.a_bar, h_bar=q.h_bar)
    assert layer.bias.grad is not None
    assert_close(q.dh_bar, layer.bias.grad, 1e-13)


def test_calls_with_different_numbers_of_locations() -> None:
    """Locations have equal weight in ā, h̄ and ∂h̄, data have equal weight in A."""
    layer: Any = extend(nn.Conv1d(2, 3, 3, dtype=F64))
    x1, x2 = torch.randn(4, 2, 7, dtype=F64), torch.randn(2, 2, 12, dtype=F64)  # 5 and 10 locations
    moments, gram = KBFGSQuantities(), InputGram()
    with backpack(moments, gram):
        h1, h2 = layer(x1), layer(x2)
        ((curved(h1).sum() + curved(h2).sum()) / 6).backward()
    q = moments[layer]
    assert q.num_data == 6 and q.num_locations == pytest.approx((4 * 5 + 2 * 10) / 6) == gram[layer].num_locations
    a = torch.cat([Explicit(layer, x, torch.zeros_like(h)).seen.a.flatten(0, 1) for x, h in ((x1, h1), (x2, h2))])
    assert_close(q.a_bar, a.mean(0), 1e-13)
    assert_close(q.h_bar, torch.cat([h.mT.flatten(0, 1) for h in (h1, h2)]).mean(0).detach(), 1e-13)
    assert_close(q.num_locations * q.dh_bar, layer.bias.grad, 1e-13)
    s = torch.randn_like(q.a_bar)
    assert_close(q.A @ s, a.T @ (a @ s) / 6, 1e-13)
    assert_close(gram[layer].A, a.T @ a / 6, 1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@some_cases
def test_accumulation_over_micro_batches_is_the_big_batch(case: Any, reduction: str) -> None:
    """Micro-batches of unequal size, with losses scaled so that .grad adds up to the big batch's."""
    layer = extend(case.layer())
    x = torch.cat((case.input(), case.input()))
    size = len(x) if reduction == "mean" else 1
    big, micro = KBFGSQuantities(reduction), KBFGSQuantities(reduction, accumulate=True)
    gram, micro_gram = InputGram(), InputGram(accumulate=True)
    with backpack(big, gram):
        (curved(layer(x)).sum() / size).backward()
    grad = layer.weight.grad.clone()
    for _ in range(2):  # the second round shows that clear() starts afresh
        layer.zero_grad()
        for part in x.split([1, 2, len(x) - 3]):
            with backpack(micro, micro_gram):
                (curved(layer(part)).sum() / size).backward()
        assert_close(layer.weight.grad, grad, 1e-13)
        same(micro[layer], big[layer])
        assert layer.weight.kbfgs is micro[layer]
        assert_close(micro_gram[layer].A, gram[layer].A, 1e-13)
        micro.clear()
        micro_gram.clear()
        assert layer not in micro and layer not in micro_gram


@some_cases
def test_accumulation_with_a_probe_keeps_the_first_direction(case: Any) -> None:
    layer = extend(case.layer())
    x = torch.cat((case.input(), case.input()))
    big, micro = KBFGSQuantities(), KBFGSQuantities(probe=lambda module, a_bar: a_bar.cos(), accumulate=True)
    first = None
    with backpack(big):
        curved(layer(x)).mean().backward()
    for part in x.split([2, len(x) - 2]):
        with backpack(micro):
            (curved(layer(part)).sum() / len(x)).backward()
        first = micro[layer] if first is None else first
    q = micro[layer]
    assert first is not None and first.s is not None and q.s is not None and q.A_s is not None
    assert torch.equal(q.s, first.a_bar.cos()) and not torch.equal(q.s, q.a_bar.cos())
    assert_close(q.A_s, big[layer].A @ q.s, 1e-13)
    same(q, big[layer])


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_late_probe_sees_all_calls(accumulate: bool) -> None:
    layer = extend(nn.Linear(4, 4, dtype=F64))
    x, whole = torch.randn(6, 4, dtype=F64), KBFGSQuantities()
    late = KBFGSQuantities(probe=lambda module, a_bar: a_bar.cos(), accumulate=accumulate)
    late.late = lambda module: True
    with backpack(whole, late):
        curved(layer(layer(x).tanh())).mean().backward()
    late.finish()
    late.finish()  # again does no harm
    q = late[layer]
    assert q.operator is None and q.s is not None and layer.weight.kbfgs is q
    assert torch.equal(q.s, whole[layer].a_bar.cos())
    assert_close(q.A_s, whole[layer].A @ q.s, 1e-13)
    late.clear()
    assert not hasattr(layer.weight, "kbfgs")


def test_accumulation_merges_calls_and_passes_alike() -> None:
    layer: Any = extend(nn.Linear(4, 4, dtype=F64))
    x = torch.randn(6, 4, dtype=F64)
    big, micro = KBFGSQuantities(), KBFGSQuantities(accumulate=True)
    for ext, parts in ((big, [x]), (micro, x.split([2, 4]))):
        for part in parts:
            with backpack(ext):
                (curved(layer(layer(part).tanh())).sum() / 6).backward()
    same(micro[layer], big[layer])


def test_a_new_pass_overwrites() -> None:
    layer: Any = extend(nn.Conv2d(2, 3, 3, dtype=F64))
    reused, fresh = KBFGSQuantities(), KBFGSQuantities()
    x1, x2 = torch.randn(5, 2, 6, 6, dtype=F64), torch.randn(3, 2, 6, 6, dtype=F64)
    with backpack(reused):
        curved(layer(x1)).mean().backward()
    before = reused[layer]
    with backpack(reused):
        curved(layer(x2)).mean().backward()
    with backpack(fresh):
        curved(layer(x2)).mean().backward()
    assert reused[layer] is not before and before.num_data == 5  # a result never changes under its reader
    same(reused[layer], fresh[layer], 0)
    assert layer.weight.kbfgs is fresh[layer]


def test_backward_twice_through_one_graph_measures_it_once() -> None:
    layer: Any = extend(nn.Linear(4, 3, dtype=F64))
    moments = KBFGSQuantities()
    loss = curved(layer(torch.randn(6, 4, dtype=F64))).mean()
    with backpack(moments):
        loss.backward(retain_graph=True)
        first = moments[layer]
        loss.backward()
    assert moments[layer].num_data == 6
    same(moments[layer], first, 0)


@some_cases
def test_a_sum_over_data_is_the_mean_times_their_number(case: Any) -> None:
    layer, x = extend(case.layer()), case.input()
    mean, total = KBFGSQuantities("mean"), KBFGSQuantities("sum")
    with backpack(mean):
        curved(layer(x)).mean().backward()
    with backpack(total):
        curved(layer(x)).sum().backward()
    same(total[layer], mean[layer])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("indices", [[0], [2, 0], [1, 1, 2], [0, 0]], ids=str)
@some_cases
def test_subsampling_measures_those_data_only(case: Any, indices: list[int], reduction: str) -> None:
    layer, x = extend(case.layer()), case.input()
    moments, gram = KBFGSQuantities(reduction, subsampling=indices), InputGram(subsampling=indices)
    with backpack(moments, gram):
        h = layer(x)
        h.retain_grad()
        loss = curved(h)
        (loss.mean() if reduction == "mean" else loss.sum()).backward()
    q, k = moments[layer], len(indices)
    per_datum = h.grad[indices] * (len(x) if reduction == "mean" else 1)
    explicit = Explicit(layer, x[indices], per_datum / k)
    assert q.num_data == gram[layer].num_data == k
    explicit.check(1e-13, a_bar=q.a_bar, h_bar=q.h_bar, dh_bar=q.dh_bar, A=gram[layer].A)
    s = torch.randn_like(q.a_bar)
    explicit.check_product(1e-13, s, q.A @ s)


def test_layers_whose_weight_is_frozen_are_passed_over_unless_named() -> None:
    model: Any = extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    model[2].weight.requires_grad_(False)  # its bias is trained still
    plain, named, x = KBFGSQuantities(), KBFGSQuantities(modules=[model[2]]), torch.randn(5, 4)
    with backpack(plain, named):
        curved(model(x)).mean().backward()
    assert model[0] in plain and model[4] in plain and model[2] not in plain
    assert model[2] in named and model[0] not in named and model[4] not in named
    assert_close(named[model[2]].dh_bar, model[2].bias.grad, 1e-5)


def test_a_wholly_frozen_network_below_is_not_measured() -> None:
    model: Any = extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    moments = KBFGSQuantities()
    with backpack(moments):
        curved(model(torch.randn(5, 4))).mean().backward()
    assert model[0] not in moments and model[2] in moments and not hasattr(model[0].weight, "kbfgs")
