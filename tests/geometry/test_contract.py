"""What every kind of layer keeps, whoever registered it and however little was written for it."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.func import functional_call, hessian

from kfqn_ext.curvature import curvature_ladder, exact_block
from kfqn_ext.extensions import FactorTraces, KBFGSQuantities, KFACFactors, extend
from kfqn_ext.geometry import LayerGeometry, base, geometry_of
from tests.cases import CASES, CONVS, IGNORE_EVEN_SAME, Case, assert_close, conv
from tests.geometry.outsider import TRANSPOSED, Transposed, taught

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
KINDS = {kind: CASES[kind] for kind in base._REGISTRY} | {Transposed: TRANSPOSED}
every_kind = pytest.mark.parametrize("case", [case for cases in KINDS.values() for case in cases], ids=str)
SMALL = {CONVS[dims]: [conv(dims, (2, 2, *(2,) * dims), i=2, o=2, k=(2, 1, 1)[:dims])] for dims in CONVS}
SMALL[nn.Conv1d].append(conv(1, (2, 4, 3), i=4, o=4, k=2, groups=2))
SMALL |= {nn.Linear: CASES[nn.Linear][:1], Transposed: TRANSPOSED[:3]}
few_parameters = pytest.mark.parametrize("case", [case for cases in SMALL.values() for case in cases], ids=str)


@pytest.fixture(autouse=True)
def _outsider() -> Iterator[None]:
    with taught():
        yield


def test_every_registered_kind_is_tested() -> None:
    assert set(KINDS) == set(SMALL)


def described(case: Case) -> tuple[Any, Any, Tensor, Tensor]:
    """A layer, its geometry, its batched input and something shaped like its output."""
    layer, x = case.layer(), case.input()
    geometry = geometry_of(layer)
    assert geometry is not None
    return layer, geometry, geometry.as_batch(x), geometry.as_batch(torch.randn_like(layer(x)))


def matrix_of(geometry: LayerGeometry, layer: Any) -> Tensor:
    return geometry.matrix(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())


@every_kind
def test_outputs_are_the_matrix_times_the_patches(case: Case) -> None:
    layer, geometry, x, _ = described(case)
    a, h, W = geometry.patches(x), geometry.outputs(layer(x).detach()), matrix_of(geometry, layer)
    assert a.shape == (len(x), h.shape[1], *geometry.blocks, geometry.d_in)
    assert h.shape == (*a.shape[:-1], geometry.d_out) and W.shape == geometry.matrix_shape
    assert_close(torch.einsum("...ij,nt...j->nt...i", W, a), h, 1e-12)
    if geometry.has_bias:
        assert torch.equal(a[..., -1], torch.ones_like(a[..., -1]))


@every_kind
@pytest.mark.parametrize("way", ["its own", "by default"])
def test_sums_equal_those_of_explicit_patches(case: Case, way: str) -> None:
    _, geometry, x, g = described(case)
    kind: Any = type(geometry) if way == "its own" else LayerGeometry
    a, h = geometry.patches(x), geometry.outputs(g)
    N, T = h.shape[:2]
    A = torch.einsum("nt...i,nt...j->...ij", a, a) / N
    s = torch.randn(*geometry.blocks, geometry.d_in, 2, dtype=F64)
    assert kind.num_locations(geometry, g) == T
    assert_close(kind.mean_patch(geometry, x), a.sum((0, 1)) / (N * T), 1e-12, a.abs().mean((0, 1)))
    assert_close(kind.gram(geometry, x), A, 1e-12)
    assert_close(kind.trace(geometry, x, T), A.diagonal(dim1=-2, dim2=-1).sum(-1), 1e-12)
    assert_close(kind.gram_product(geometry, x, s), A @ s, 1e-12, A.abs() @ s.abs())
    assert_close(kind.sum_outputs(geometry, g), h.sum((0, 1)), 1e-12, h.abs().sum((0, 1)))
    G, v = torch.einsum("nt...i,nt...j->...ij", h, h), torch.randn(*geometry.blocks, geometry.d_out, 2, dtype=F64)
    assert_close(kind.gram_outputs(geometry, g), G, 1e-12)
    assert_close(kind.gram_outputs_product(geometry, g, v), G @ v, 1e-12, G.abs() @ v.abs())
    bound, absolute = kind.bound_sum_abs(geometry, g), h.abs().sum((0, 1))
    assert (absolute <= bound * (1 + 1e-12)).all() and (bound <= math.sqrt(T) * absolute * (1 + 1e-12)).all()


@every_kind
@pytest.mark.parametrize("few", [0, 10_000])
def test_products_of_outputs_are_the_same_for_few_and_many(case: Case, few: int) -> None:
    _, geometry, _, g = described(case)
    v = torch.randn(*geometry.blocks, geometry.d_out, 3, dtype=F64)
    expected = LayerGeometry.gram_outputs_product(geometry, g, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfqn_ext.geometry.conv._FEW_OUTPUTS", few)
        assert_close(geometry.gram_outputs_product(g, v), expected, 1e-12, geometry.gram_outputs(g).abs() @ v.abs())


@every_kind
def test_the_matrix_and_its_columns(case: Case) -> None:
    """Columns are the parameters in their own layout, and views: what is written to them is written to W."""
    layer, geometry, _, _ = described(case)
    W = matrix_of(geometry, layer)
    weight, bias = geometry.columns(W, layer.weight.shape)
    assert torch.equal(weight, layer.weight)
    assert bias is None if layer.bias is None else torch.equal(bias, layer.bias)
    assert torch.equal(geometry.to_matrix(layer.weight), W[..., : geometry.inner])
    written = torch.zeros_like(W)
    for part, p in zip(geometry.columns(written, layer.weight.shape), (layer.weight, layer.bias), strict=True):
        if part is not None:
            part.add_(p.detach())
    assert torch.equal(written, W)
    assert torch.equal(geometry.write_matrix(torch.zeros_like(W), weight, bias), W)
    a = torch.randn(*geometry.blocks, geometry.d_in, dtype=F64)
    assert_close(geometry.multiply(weight, bias, a), (W @ a.unsqueeze(-1)).squeeze(-1), 1e-12, W.abs().sum(-1))


def test_columns_are_never_copies() -> None:
    geometry = geometry_of(nn.Conv2d(4, 6, 3, groups=2))
    assert geometry is not None
    W = torch.zeros(geometry.d_out, geometry.groups, geometry.d_in).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        geometry.columns(W, (6, 2, 3, 3))


@every_kind
def test_quantities_and_autograd(case: Case) -> None:
    """h̄ = W ā, |T| ∂h̄ = ∂bias, vec(∂W) = Σ_n Σ_t a_t ⊗ ∂h_t, A s = A · s."""
    layer, x = extend(case.layer()), case.input()
    geometry = geometry_of(layer)
    assert geometry is not None
    moments, factors, traces = KBFGSQuantities(), KFACFactors(), FactorTraces()
    with backpack(moments, factors, traces):
        h = layer(x)
        h.retain_grad()
        (h.sin() + h.square()).sum().div(len(geometry.as_batch(h))).backward()
    q, f, batch = moments[layer], factors[layer], geometry.as_batch(x)
    a, dh = geometry.patches(batch), geometry.outputs(geometry.as_batch(h.grad))
    N, T = a.shape[:2]
    assert (q.num_data, q.num_locations) == (f.num_data, f.num_locations) == (N, T)
    W = matrix_of(geometry, layer)
    assert_close(q.h_bar, (W @ q.a_bar.unsqueeze(-1)).squeeze(-1), 1e-12, W.abs().sum(-1))
    assert_close(q.h_bar, geometry.outputs(geometry.as_batch(h.detach())).mean((0, 1)), 1e-12, W.abs().sum(-1))
    if layer.bias is not None:
        assert_close(T * q.dh_bar.flatten(), layer.bias.grad, 1e-12)
    grad = geometry.matrix(layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    assert_close(grad, torch.einsum("nt...i,nt...j->...ij", dh, a), 1e-12)
    assert_close(q.A @ q.a_bar, (f.Omega @ q.a_bar.unsqueeze(-1)).squeeze(-1), 1e-12)
    for got, factor in ((traces[layer].A, f.Omega), (traces[layer].G, f.Gamma)):
        assert_close(got, factor.diagonal(dim1=-2, dim2=-1).mean(-1), 1e-12)
    assert_close(f.Gamma, torch.einsum("nt...i,nt...j->...ij", dh, dh) * N / T, 1e-12)


def mean_curved(h: Tensor, y: Tensor) -> Tensor:
    return (h.sin() + h.square() * y).flatten(1).sum(1).mean()


@few_parameters
def test_the_exact_block_in_both_orders(case: Case) -> None:
    layer, x = case.layer(), case.input()
    geometry = geometry_of(layer)
    assert geometry is not None
    y, named = torch.rand_like(layer(x).detach()), dict(layer.named_parameters())
    shapes = [p.shape for p in named.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        tensors = {name: part.reshape(s) for name, part, s in zip(named, parts, shapes, strict=True)}
        return mean_curved(functional_call(layer, tensors, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in named.values()])
    want = hessian(loss)(flat)
    assert_close(exact_block(layer, mean_curved, x, y, layer, order="torch"), want, 1e-10)
    places = torch.arange(len(flat)).split([shape.numel() for shape in shapes])
    bias = None if layer.bias is None else places[-1]
    index = geometry.matrix(places[0].reshape(shapes[0]), bias).mT.flatten(-2).reshape(geometry.groups, -1)
    blocks = torch.stack([want[i][:, i] for i in index]).reshape(*geometry.blocks, index.shape[1], -1)
    assert_close(exact_block(layer, mean_curved, x, y, layer), blocks, 1e-10)


@few_parameters
def test_the_ladder_begins_with_the_exact_block(case: Case) -> None:
    """Its second rung is ``thm_4``, from patches, and its first from the weights: they are equal."""
    model, x = nn.Sequential(case.layer(), nn.Tanh()), case.input()
    y = torch.rand_like(model(x).detach())
    (layer,) = curvature_ladder(model, mean_curved, x, y, progress=False)
    assert layer.rows[1].error < 1e-10 and layer.rows[1].cosine == pytest.approx(1.0)
