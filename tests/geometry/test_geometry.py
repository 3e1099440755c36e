"""Every registered geometry against explicit patches, on fixed and on random layers."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.geometry import base, geometry_of
from tests import reference as ref
from tests.cases import (
    CASES,
    FEW_EXAMPLES,
    IGNORE_EVEN_SAME,
    Case,
    Explicit,
    assert_close,
    every_case,
    random_cases,
)

pytestmark = IGNORE_EVEN_SAME
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def pass_through(case: Case, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The layer, its batched input and output, and the gradient by the output of a loss that is a mean over data."""
    layer, x = case.layer(dtype), case.input(dtype)
    geometry = geometry_of(layer)
    assert geometry is not None
    h = layer(x)
    num_data = geometry.as_batch(x).shape[0]
    g = torch.randn_like(h) / num_data
    h.backward(g)
    return layer, geometry.as_batch(x), geometry.as_batch(h.detach()), geometry.as_batch(g)


def check(case: Case, dtype: torch.dtype) -> None:
    """h_t = W a_t, vec(∂W) = Σ_t a_t ⊗ ∂h_t, and ā, A, A s and Σ_t of the outputs against explicit patches."""
    tol = TOLERANCE[dtype]
    layer, x, h, g = pass_through(case, dtype)
    geometry = geometry_of(layer)
    assert geometry is not None
    explicit = Explicit(layer, x, g)
    a, W = (
        geometry.patches(x),
        geometry.matrix(layer.weight.detach(), None if layer.bias is None else layer.bias.detach()),
    )

    assert torch.equal(a, ref.patches(layer, x))  # patches are copied, not computed
    assert torch.equal(geometry.outputs(g), ref.outputs(layer, g))
    assert torch.equal(W, ref.weight_matrix(layer)) and W.shape == geometry.matrix_shape
    assert geometry.num_locations(h) == a.shape[1] == explicit.seen.num_locations
    assert a.shape[2:] == (*geometry.blocks, geometry.d_in)
    assert_close(
        torch.einsum("...ij,nt...j->nt...i", W, a), geometry.outputs(h), tol, W.abs().sum(-1).max() * a.abs().max()
    )

    grad = geometry.matrix(layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    explicit.check(tol, DW=torch.einsum("nt...i,nt...j->...ij", geometry.outputs(g), a))
    explicit.check(tol, DW=grad)
    explicit.check(tol, a_bar=geometry.mean_patch(x), A=geometry.gram(x))
    T = explicit.seen.num_locations
    explicit.check(tol, dh_bar=geometry.sum_outputs(g) / T)
    assert_close(geometry.bound_sum_abs(g), ref.bound_sum_abs(layer, g), tol)
    explicit.check(tol, Gamma=geometry.gram_outputs(g) * explicit.seen.num_data / T)
    if geometry.has_bias:
        assert_close(grad[..., -1], geometry.sum_outputs(g), tol, explicit.size.dh_bar * T)
    for k in (1, 3):
        s = torch.randn(*geometry.blocks, geometry.d_in, k, dtype=dtype)
        explicit.check_product(tol, s, geometry.gram_product(x, s))


def test_every_registered_kind_has_cases() -> None:
    torch_kinds = {kind for kind in base._REGISTRY if kind.__module__.startswith("torch.")}
    assert torch_kinds == set(CASES)


@every_case
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31), dtype=st.sampled_from(list(TOLERANCE)))
def test_random_layer(case: Case, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    check(case, dtype)


@every_case
def test_columns_undo_matrix(case: Case) -> None:
    layer = case.layer()
    geometry = geometry_of(layer)
    assert geometry is not None
    weight, bias = geometry.columns(
        geometry.matrix(layer.weight.detach(), getattr(layer, "bias", None)), layer.weight.shape
    )
    assert torch.equal(weight, layer.weight)
    assert bias is None if layer.bias is None else torch.equal(bias, layer.bias)


def test_channels_last_changes_nothing() -> None:
    layer, x = nn.Conv2d(4, 6, 3, padding=1, groups=2).double(), torch.randn(3, 4, 6, 5, dtype=torch.float64)
    last, x_last = copy.deepcopy(layer).to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    a, b = geometry_of(layer), geometry_of(last)
    assert a is not None and b is not None and a == b
    s = torch.randn(2, a.d_in, 2, dtype=torch.float64)
    assert torch.equal(a.matrix(layer.weight, layer.bias), b.matrix(last.weight, last.bias))
    assert_close(b.gram_product(x_last, s), a.gram_product(x, s), 1e-14)
    assert_close(b.gram(x_last), a.gram(x), 1e-14)
    assert_close(b.mean_patch(x_last), a.mean_patch(x), 1e-14)
    g = torch.randn(3, 6, 6, 5, dtype=torch.float64)
    assert_close(b.bound_sum_abs(g.to(memory_format=torch.channels_last)), a.bound_sum_abs(g), 1e-14)
