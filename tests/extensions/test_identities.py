"""The quantities of every kind of layer, as the extensions report them, against explicit patches and autograd."""

import copy
from collections.abc import Callable
from typing import Any

import backpack as stock
import pytest
import torch
from backpack import backpack
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.extensions import InputGram, KBFGSQuantities, LayerMoments, extend
from kfqn_ext.geometry import geometry_of
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, IGNORE_EVEN_SAME, Case, Explicit, assert_close, every_case, random_cases

pytestmark = IGNORE_EVEN_SAME
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def run(
    case: Case, dtype: torch.dtype, how: Callable[[nn.Module], Any]
) -> tuple[Any, Tensor, Explicit, LayerMoments, Any]:
    """One backward pass of a loss that is a mean over data, under both extensions."""
    layer, x = case.layer(dtype), case.input(dtype)
    geometry = geometry_of(layer)
    assert geometry is not None
    how(nn.Sequential(layer))
    moments, gram = KBFGSQuantities(), InputGram()
    with backpack(moments, gram):
        h = layer(x)
        num_data = geometry.as_batch(x).shape[0]
        g = torch.randn_like(h) / num_data
        (h * g).sum().backward()
    explicit = Explicit(layer, x, g)
    assert explicit.seen.num_data == num_data
    return layer, h.detach(), explicit, moments[layer], gram[layer]


def check(case: Case, dtype: torch.dtype, how: Callable[[nn.Module], Any]) -> None:
    tol = TOLERANCE[dtype]
    layer, h, explicit, q, gram = run(case, dtype, how)
    assert layer.weight.kbfgs is q and layer.weight.input_gram is gram
    assert (q.num_data, q.num_locations) == (explicit.seen.num_data, explicit.seen.num_locations)
    assert (gram.num_data, gram.num_locations) == (q.num_data, q.num_locations)

    explicit.check(tol, a_bar=q.a_bar, h_bar=q.h_bar, dh_bar=q.dh_bar, A=gram.A)
    W = explicit.W.to(dtype)
    assert_close(q.h_bar, (W @ q.a_bar.unsqueeze(-1)).squeeze(-1), tol, explicit.size.h_bar)  # h̄ = W ā
    explicit.check(tol, h_bar=q.h_bar)  # … is the mean of the true outputs
    if layer.bias is not None:  # ∂bias = |T| ∂h̄
        T = q.num_locations
        assert_close(T * q.dh_bar.flatten(), layer.bias.grad, tol, T * explicit.size.dh_bar)

    blocks, d = explicit.seen.A.shape[:-2], explicit.seen.A.shape[-1]
    assert q.A.shape == explicit.seen.A.shape
    for shape in ((*blocks, d), (*blocks, d, 1), (*blocks, d, 3)):
        s = torch.randn(shape, dtype=dtype)
        explicit.check_product(tol, s, q.A @ s)
    noise = 16 * torch.finfo(dtype).eps * ref.bound_sum_abs(layer, explicit.g) / q.num_locations
    assert_close(q.dh_noise, noise, tol)


@every_case
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, extend)


@every_case
def test_case_after_stock_extend(case: Case) -> None:
    check(case, torch.float64, stock.extend)


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31), dtype=st.sampled_from(list(TOLERANCE)))
def test_random_layer(case: Case, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    check(case, dtype, extend)


@every_case
def test_both_ways_of_extending_give_equal_results(case: Case) -> None:
    results = []
    for how in (extend, stock.extend, lambda m: stock.extend(extend(m)), lambda m: extend(stock.extend(m))):
        torch.manual_seed(1)
        results.append(run(case, torch.float64, how)[3:])
    s = torch.randn_like(results[0][0].a_bar)
    for q, gram in results[1:]:
        for name in ("a_bar", "h_bar", "dh_bar", "dh_noise", "num_data", "num_locations"):
            one, other = getattr(q, name), getattr(results[0][0], name)
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert torch.equal(q.A @ s, results[0][0].A @ s) and torch.equal(gram.A, results[0][1].A)


@every_case
def test_probe_computes_the_product_and_lets_the_input_go(case: Case) -> None:
    layer, x = case.layer(), case.input()
    extend(layer)
    plain, probed = KBFGSQuantities(), KBFGSQuantities(probe=lambda module, a_bar: 2 * a_bar + 1)
    with backpack(plain, probed):
        layer(x).square().mean().backward()
    q, p = plain[layer], probed[layer]
    assert p.s is not None and p.A_s is not None and p.operator is None and q.s is None and q.A_s is None
    assert torch.equal(p.s, 2 * q.a_bar + 1) and torch.equal(p.A_s, q.A @ p.s)
    assert torch.equal(p.a_bar, q.a_bar) and torch.equal(p.dh_bar, q.dh_bar)


def test_a_product_with_the_wrong_shape_names_both_shapes() -> None:
    layer = extend(nn.Conv2d(4, 6, 3, groups=2))
    with backpack(KBFGSQuantities()):
        layer(torch.rand(2, 4, 5, 5)).sum().backward()
    weight: Any = layer.weight
    for shape in ((19,), (2, 18), (3, 19), (2, 18, 3), ()):
        with pytest.raises(ValueError, match=r"A has shape \[2, 19, 19\]"):
            weight.kbfgs.A @ torch.rand(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers_have_float32_quantities(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(5, 4).to(dtype), torch.randn(8, 5).to(dtype)
    extend(layer)
    moments, gram = KBFGSQuantities(), InputGram()
    with backpack(moments, gram):
        layer(x).float().square().mean().backward()
    q = moments[layer]
    explicit = Explicit(layer, x, torch.zeros(8, 4))
    explicit.check(1e-5, a_bar=q.a_bar, A=gram[layer].A)
    assert {t.dtype for t in (q.a_bar, q.h_bar, q.dh_bar, q.A @ q.a_bar, gram[layer].A)} == {torch.float32}


@pytest.mark.parametrize("how", [extend, stock.extend])
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.Linear(6, 3)], ids=str)
def test_autocast_leaves_quantities_in_float32(layer: Any, how: Callable[[nn.Module], Any]) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(4, 2, 6, 6)
    how(layer)
    moments, probed, gram = KBFGSQuantities(), KBFGSQuantities(probe=lambda module, a_bar: a_bar + 1), InputGram()
    with backpack(moments, probed, gram), torch.autocast("cpu", torch.bfloat16):
        h = layer(x)
        h.float().square().mean().backward()
    explicit, q, p = Explicit(layer, x, torch.zeros(h.shape)), moments[layer], probed[layer]
    assert p.s is not None and p.A_s is not None
    explicit.check(1e-5, a_bar=q.a_bar, A=gram[layer].A)
    assert_close(q.h_bar, (explicit.W @ explicit.seen.a_bar.unsqueeze(-1)).squeeze(-1), 1e-5, explicit.size.h_bar)
    explicit.check_product(1e-5, p.s, p.A_s)
    explicit.check_product(1e-5, p.s, q.A @ p.s)
    assert {t.dtype for t in (q.a_bar, q.h_bar, q.dh_bar, p.A_s, gram[layer].A)} == {torch.float32}


def test_products_inside_autocast_are_float32_too() -> None:
    layer, x = extend(nn.Conv2d(2, 3, 3)), torch.randn(4, 2, 6, 6)
    moments = KBFGSQuantities()
    with backpack(moments), torch.autocast("cpu", torch.bfloat16):
        layer(x).float().square().mean().backward()
        s = moments[layer].a_bar
        A_s = moments[layer].A @ s
    Explicit(layer, x, torch.zeros(4, 3, 4, 4)).check_product(1e-5, s, A_s)
