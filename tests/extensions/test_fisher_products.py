"""Γ s and tr Γ / d_out without Γ: those of the Γ that KFACFactors forms, whatever is merged, left out or scaled."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import FisherProducts, KFACFactors, extend
from kfqn_ext.geometry import geometry_of
from tests.cases import ALL_CASES, IGNORE_EVEN_SAME, Case, assert_close, every_case
from tests.extensions.test_merging import curved, some_cases

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def directions(module: Any) -> tuple[Tensor, Tensor]:
    """Two, others in each block; and what is to be handed on."""
    dtype = torch.promote_types(module.weight.dtype, torch.float32)
    s = torch.arange(1.0, 1 + 2 * len(module.weight), dtype=dtype).cos()
    groups = getattr(module, "groups", 1)
    s = s.reshape(-1, 2) if groups == 1 else s.reshape(groups, -1, 2)
    return s, 3 * s


def both(**options: Any) -> tuple[FisherProducts, KFACFactors]:
    return FisherProducts(probe=directions, **options), KFACFactors(**options)


def same(module: nn.Module, products: FisherProducts, factors: KFACFactors, tol: float = 1e-12) -> None:
    q, f = products[module], factors[module]
    assert (q.num_data, q.num_locations) == (f.num_data, f.num_locations)
    s, kept = directions(module)
    assert torch.equal(q.s, s) and q.kept is not None and torch.equal(q.kept, kept)
    assert_close(q.Gamma_s, f.Gamma @ q.s, tol, f.Gamma.abs() @ q.s.abs())
    assert_close(q.trace, f.Gamma.diagonal(dim1=-2, dim2=-1).mean(-1), tol)


@reductions
@every_case
def test_of_every_layer(case: Case, reduction: str) -> None:
    layer, x = extend(case.layer()), case.input()
    extensions = both(reduction=reduction)
    with backpack(*extensions):
        h = layer(x)
        (h.sin() + h.square()).sum().backward()
    same(layer, *extensions)
    assert extensions[0][layer].trace.min() > 0


def test_without_a_probe_all_outputs_are_looked_at() -> None:
    for probe in (None, lambda module: None):
        layer, products, factors = extend(nn.Conv2d(4, 6, 3, groups=2)), FisherProducts(probe=probe), KFACFactors()
        with backpack(products, factors):
            curved(layer(torch.randn(5, 4, 6, 6))).mean().backward()
        assert torch.equal(products[layer].s, torch.ones(2, 3, 1)) and products[layer].kept is None
        assert_close(products[layer].Gamma_s, factors[layer].Gamma.sum(-1, keepdim=True), 1e-5)


@reductions
@some_cases
def test_calls_of_a_layer_are_one_batch(case: Case, reduction: str) -> None:
    layer = extend(case.layer())
    x1, x2 = case.input(), case.input()[:2]
    size = len(x1) + len(x2) if reduction == "mean" else 1
    extensions, once = both(reduction=reduction), FisherProducts(reduction, probe=directions)
    with backpack(*extensions):
        ((curved(layer(x1)).sum() + curved(layer(x2)).sum()) / size).backward()
    with backpack(once):
        (curved(layer(torch.cat((x1, x2)))).sum() / size).backward()
    same(layer, *extensions)
    assert extensions[0][layer].num_data == len(x1) + len(x2)
    assert_close(extensions[0][layer].Gamma_s, once[layer].Gamma_s, 1e-12)
    assert_close(extensions[0][layer].trace, once[layer].trace, 1e-12)


def test_calls_with_different_numbers_of_locations() -> None:
    layer: Any = extend(nn.Conv1d(2, 3, 3, dtype=F64))
    extensions = both()
    with backpack(*extensions):
        parts = [curved(layer(torch.randn(n, 2, length, dtype=F64))).sum() for n, length in ((4, 7), (2, 12))]
        (sum(parts) / 6).backward()
    same(layer, *extensions)


@reductions
@some_cases
def test_micro_batches_are_the_big_batch(case: Case, reduction: str) -> None:
    layer, x = extend(case.layer()), torch.cat((case.input(), case.input()))
    size = len(x) if reduction == "mean" else 1
    extensions, big = both(reduction=reduction, accumulate=True), FisherProducts(reduction, probe=directions)
    with backpack(big):
        (curved(layer(x)).sum() / size).backward()
    for part in x.split([1, 2, len(x) - 3]):
        with backpack(*extensions):
            (curved(layer(part)).sum() / size).backward()
    same(layer, *extensions)
    assert_close(extensions[0][layer].Gamma_s, big[layer].Gamma_s, 1e-12)
    assert_close(extensions[0][layer].trace, big[layer].trace, 1e-12)


@reductions
@some_cases
def test_directions_that_come_later(case: Case, reduction: str) -> None:
    """Of several calls and micro-batches, Γ that is kept multiplies as the one that was looked at."""
    layer, x = extend(case.layer()), torch.cat((case.input(), case.input()))
    size = len(x) if reduction == "mean" else 1
    late, factors = FisherProducts(reduction, accumulate=True), KFACFactors(reduction, accumulate=True)
    late.late = True
    for part in x.split([1, len(x) - 1]):
        with backpack(late, factors):
            (sum(curved(layer(x_)).sum() for x_ in part.split(2)) / size).backward()
    q, Gamma, (s, _) = late[layer], factors[layer].Gamma, directions(layer)
    assert q.operator is not None and not q.Gamma_s.any()
    assert_close(q.operator.times(s), Gamma @ s, 1e-12, Gamma.abs() @ s.abs())
    assert_close(q.trace, Gamma.diagonal(dim1=-2, dim2=-1).mean(-1), 1e-12)
    assert repr(q.operator).startswith("FisherOperator(of [")


@reductions
@pytest.mark.parametrize("subsampling", [[0], [2, 0], 0.5], ids=str)
@some_cases
def test_of_some_data(case: Case, subsampling: Any, reduction: str) -> None:
    layer, x = extend(case.layer()), case.input()
    extensions = both(reduction=reduction, subsampling=subsampling)
    with backpack(*extensions):
        loss = curved(layer(x))
        (loss.mean() if reduction == "mean" else loss.sum()).backward()
    same(layer, *extensions)


def test_a_layer_is_probed_once_for_all_of_its_calls_and_passes() -> None:
    layer, asked = extend(nn.Linear(3, 3)), []

    def probe(module: nn.Module) -> tuple[Tensor, Tensor]:
        asked.append(module)
        return torch.full((3, 1), float(len(asked))), torch.zeros(())

    products = FisherProducts(accumulate=True, probe=probe)
    for _ in range(2):
        with backpack(products):
            layer(layer(torch.randn(4, 3))).sum().backward()
    assert asked == [layer] and torch.equal(products[layer].s, torch.ones(3, 1))
    products.clear()
    with backpack(products):
        layer(torch.randn(4, 3)).sum().backward()
    assert len(asked) == 2


def test_a_second_loss_of_one_forward_pass_is_refused() -> None:
    layer, products = extend(nn.Linear(3, 2)), FisherProducts(accumulate=True)
    with backpack(products):
        h = layer(torch.randn(4, 3))
        h.sum().backward(retain_graph=True)
        with pytest.raises(NotImplementedError, match="FisherProducts met a second backward pass"):
            h.sin().sum().backward()


def test_a_scaled_loss() -> None:
    layer, x = extend(nn.Linear(3, 2, dtype=F64)), torch.randn(4, 3, dtype=F64)
    plain, scaled = both(), both()
    for extensions, scale in ((plain, 1.0), (scaled, 1024.0)):
        for ext in extensions:
            ext.loss_scale = scale
        with backpack(*extensions):
            (scale * curved(layer(x)).mean()).backward()
        same(layer, *extensions)
    assert_close(scaled[0][layer].Gamma_s, plain[0][layer].Gamma_s, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    for case in (ALL_CASES[0], ALL_CASES[-1]):
        layer, extensions = extend(case.layer(dtype)), both()
        with backpack(*extensions):
            curved(layer(case.input(dtype))).mean().backward()
        assert extensions[0][layer].Gamma_s.dtype == extensions[0][layer].trace.dtype == torch.float32
        same(layer, *extensions, tol=1e-5)


def test_a_blank_has_the_shapes_of_a_result() -> None:
    layer, products = extend(nn.Conv2d(4, 6, 3, groups=2)), FisherProducts()
    with backpack(products):
        layer(torch.randn(5, 4, 6, 6)).sum().backward()
    geometry = geometry_of(layer)
    assert geometry is not None
    blank = FisherProducts.blank(geometry, layer.weight)
    for name in ("s", "Gamma_s", "trace"):
        assert getattr(blank, name).shape == getattr(products[layer], name).shape
