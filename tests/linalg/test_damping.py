"""Double damping: the inequalities of the paper, for every pair."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import (
    bfgs_update,
    compact_matrix,
    compact_middle,
    double_damping_2020,
    powell_identity_lm,
    powell_lm,
)
from kfqn_ext.linalg.compact import push_unit_pair
from kfqn_ext.linalg.pairs import dot, unit_pair_beside
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, assert_close

F64 = torch.float64
kinds = st.sampled_from(["random", "curved", "negative", "orthogonal", "zero s", "zero y", "zero", "parallel"])
strategies: dict[str, Any] = {
    "seed": st.integers(0, 2**31),
    "kind": kinds,
    "d": st.integers(1, 6),
    "blocks": st.sampled_from([(), (3,)]),
    "mu1": st.floats(0.05, 0.95),
    "exponent": st.integers(-4, 4),
    "scale": st.integers(-30, 30),
}


def spd(*shape: int) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=F64)
    return root @ root.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=F64)


def pair(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
    s, y = torch.randn(2, *shape, dtype=F64)
    if kind == "curved":
        y = s + 0.1 * y
    elif kind == "negative":
        y = -s + 0.1 * y
    elif kind == "orthogonal":
        y = y - dot(y, s) / dot(s, s) * s
    elif kind == "parallel":
        y = 2 * s
    s = 0 * s if kind in ("zero s", "zero") else s
    y = 0 * y if kind in ("zero y", "zero") else y
    return s, y


def at_least(left: Tensor, right: Tensor, tol: float = 1e-10) -> None:
    assert (left >= right - tol * (left.abs() + right.abs())).all(), (left, right)


def times(H: Tensor, v: Tensor) -> Tensor:
    return (H @ v.unsqueeze(-1)).squeeze(-1)


@FEW_EXAMPLES
@given(**strategies)
def test_algo_5(seed: int, kind: str, d: int, blocks: Any, mu1: float, exponent: int, scale: int) -> None:
    """s̃ᵀy ≥ μ₁ yᵀHy and s̃ᵀỹ ≥ μ₂ ‖s̃‖², and equality with the paper's text."""
    torch.manual_seed(seed)
    mu2, H, (s, y) = 10.0**exponent, spd(*blocks, d), pair(kind, *blocks, d)
    s, y = s * 10.0**scale, y * 10.0**scale
    Hy = times(H, y)
    s1, y1 = powell_lm(s, y, Hy, mu1, mu2)
    at_least(dot(s1, y), mu1 * dot(y, Hy))
    at_least(dot(s1, y1), mu2 * dot(s1, s1))
    if kind not in ("zero y", "zero"):
        want = ref.powell_lm(s, y, H, mu1, mu2)
        assert_close(s1, want[0], 1e-10, torch.stack((s, Hy)))
        assert_close(y1, want[1], 1e-10, torch.stack((y, mu2 * s, mu2 * Hy)))


@FEW_EXAMPLES
@given(**strategies)
def test_algo_6_and_lemma_3(seed: int, kind: str, d: int, blocks: Any, mu1: float, exponent: int, scale: int) -> None:
    """‖s̃‖² ≤ s̃ᵀỹ / μ₂ and ‖ỹ‖² ≤ s̃ᵀỹ / μ₃ with μ₃ = μ₁ / (μ₂ (1 + 2 μ₁))."""
    torch.manual_seed(seed)
    mu2, (s, y) = 10.0**exponent, pair(kind, *blocks, d)
    s, y = s * 10.0**scale, y * 10.0**scale
    s1, y1 = powell_identity_lm(s, y, torch.full_like(y, float("nan")), mu1, mu2)  # H y is not used
    mu3 = mu1 / (mu2 * (1 + 2 * mu1))
    at_least(dot(s1, y), mu1 / mu2 * dot(y, y))
    at_least(dot(s1, y1) / mu2, dot(s1, s1))
    at_least(dot(s1, y1) / mu3, dot(y1, y1))
    if kind not in ("zero y", "zero"):
        for got, want in zip((s1, y1), ref.powell_identity_lm(s, y, mu1, mu2), strict=True):
            assert_close(got, want, 1e-10, torch.stack((s, y, y / mu2, mu2 * s)))


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


@FEW_EXAMPLES
@given(**{**strategies, "exponent": st.integers(-2, 2), "scale": st.just(0)})
def test_lemma_4(seed: int, kind: str, d: int, blocks: Any, mu1: float, exponent: int, scale: int) -> None:
    """‖B⁺‖ ≤ ‖B‖ + 1/μ₃ and ‖H⁺‖ ≤ (1 + 1/√(μ₂μ₃))² ‖H‖ + 1/μ₂ for pairs of algo_6."""
    torch.manual_seed(seed)
    mu2, H, (s, y) = 10.0**exponent, spd(*blocks, d), pair(kind, *blocks, d)
    mu3 = mu1 / (mu2 * (1 + 2 * mu1))
    plus = bfgs_update(H, *powell_identity_lm(s, y, y, mu1, mu2))
    at_least(norm(torch.linalg.inv(H)) + 1 / mu3, norm(torch.linalg.inv(plus)), 1e-6)
    at_least((1 + 1 / math.sqrt(mu2 * mu3)) ** 2 * norm(H) + 1 / mu2, norm(plus), 1e-9)


@pytest.mark.parametrize("mu2", [0.05, 1.0, 20.0])
def test_lemma_5_bounds_the_limited_memory_matrix(mu2: float) -> None:
    """(λ_G + p/μ₃)⁻¹ I ⪯ H ⪯ (μ̂ᵖ/λ_G + (μ̂ᵖ - 1)/(μ̂ - 1)/μ₂) I with λ_G = μ₂ and μ̂ = (1 + 1/√(μ₂μ₃))²."""
    p, d, mu1 = 4, 6, 0.2
    mu3 = mu1 / (mu2 * (1 + 2 * mu1))
    hat = (1 + 1 / math.sqrt(mu2 * mu3)) ** 2
    pairs = torch.zeros(2 * p, d, dtype=F64)
    for _ in range(50):
        s, y = pair("random", d)
        damped = powell_identity_lm(s, y, y, mu1, mu2)
        pairs = push_unit_pair(pairs, *unit_pair_beside(*damped, torch.ones(1, dtype=F64)))
        eigenvalues = torch.linalg.eigvalsh(compact_matrix(pairs, compact_middle(pairs, 1 / mu2), 1 / mu2))
        at_least(eigenvalues[0], torch.tensor(1 / (mu2 + p / mu3), dtype=F64))
        at_least(torch.tensor(hat**p / mu2 + (hat**p - 1) / (hat - 1) / mu2, dtype=F64), eigenvalues[-1])


@FEW_EXAMPLES
@given(**strategies)
def test_double_damping_2020(seed: int, kind: str, d: int, blocks: Any, mu1: float, exponent: int, scale: int) -> None:
    """s̃ᵀỹ ≥ μ₂ ‖s̃‖² for μ₂ ≤ 1; a larger μ₂ acts as 1."""
    torch.manual_seed(seed)
    mu2, H, (s, y) = 10.0**exponent, spd(*blocks, d), pair(kind, *blocks, d)
    s, y = s * 10.0**scale, y * 10.0**scale
    Hy = times(H, y)
    s1, y1 = double_damping_2020(s, y, Hy, mu1, mu2)
    assert torch.isfinite(s1).all() and torch.isfinite(y1).all()
    at_least(dot(s1, y), mu1 * dot(y, Hy))
    at_least(dot(s1, y1), min(mu2, 1.0) * dot(s1, s1))
    if kind not in ("zero y", "zero"):
        for got, want in zip((s1, y1), ref.double_damping_2020(s, y, H, mu1, min(mu2, 1.0)), strict=True):
            assert_close(got, want, 1e-9, torch.stack((s, y, Hy)))


@pytest.mark.parametrize("share", [0.5, 0.95, 1.05])
def test_powells_condition_is_met_exactly_where_it_was_not(share: float) -> None:
    """From sᵀy = share · μ₁ yᵀHy: damped to equality below, left alone above."""
    torch.manual_seed(0)
    mu1, H, y = 0.2, spd(5), torch.randn(5, dtype=F64)
    Hy = H @ y
    s = torch.randn(5, dtype=F64)
    s = s - (s @ y) / (y @ y) * y + share * mu1 * (y @ Hy) / (y @ y) * y
    s1, _ = powell_lm(s, y, Hy, mu1, 1.0)
    assert float(s1 @ y / (y @ Hy)) == pytest.approx(max(share, 1.0) * mu1, rel=1e-12)
    assert share < 1 or torch.equal(s1, s)


@pytest.mark.parametrize("damping", [powell_lm, powell_identity_lm, double_damping_2020])
def test_a_good_pair_is_only_shifted(damping: Any) -> None:
    """No pair is damped on H that meets Powell's condition already; batched equals one at a time."""
    torch.manual_seed(0)
    mu2 = 0.5
    s = torch.randn(4, 5, dtype=F64)
    y = s / 1.5  # curvature 1/1.5: above μ₁ yᵀHy for H = I and for H = I/μ₂, and above μ₂
    s1, y1 = damping(s, y, y, 0.2, mu2)
    assert torch.equal(s1, s)
    assert_close(y1, y if damping is double_damping_2020 else y + mu2 * s, 1e-15)
    s[1] *= -1
    together = damping(s, y, y, 0.2, torch.full((4, 1), mu2, dtype=F64))
    alone = [damping(s[i], y[i], y[i], 0.2, mu2) for i in range(4)]
    for i in range(2):
        assert_close(together[i], torch.stack([one[i] for one in alone]), 1e-15)


@pytest.mark.parametrize("damping", [powell_lm, powell_identity_lm, double_damping_2020])
def test_zeros_stay_zeros_without_nan(damping: Any) -> None:
    zero = torch.zeros(3, 4)
    for one in damping(zero, zero, zero, 0.2, 0.3):
        assert torch.equal(one, zero)
    s = torch.randn(3, 4)
    assert all(torch.isfinite(one).all() for one in damping(s, zero, zero, 0.2, 0.3))
