"""Kronecker products and damped inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import damped_inverse, kronecker, kronecker_matmul
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, assert_close

F64 = torch.float64


@pytest.fixture(autouse=True, params=[False, True], ids=["cpu", "as on a gpu"])
def host_would_wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "_host_would_wait", lambda A: request.param)


def test_kronecker_matmul_is_the_dense_one() -> None:
    """``(H_A ⊗ H_G) vec(M) = vec(H_G M H_A)`` with vec stacking columns, per block."""
    H_G, M, H_A = torch.randn(3, 4, 4, dtype=F64), torch.randn(3, 4, 5, dtype=F64), torch.randn(3, 5, 5, dtype=F64)
    H_A = H_A + H_A.mT
    got = kronecker_matmul(H_G, M, H_A)
    for b in range(3):
        want = torch.kron(H_A[b].contiguous(), H_G[b].contiguous()) @ M[b].T.reshape(-1)
        assert_close(got[b].T.reshape(-1), want, 1e-14)


@FEW_EXAMPLES
@given(
    seed=st.integers(0, 2**31),
    d=st.integers(1, 8),
    rank=st.integers(0, 8),
    blocks=st.sampled_from([(), (3,)]),
    exponent=st.integers(-4, 4),
)
def test_damped_inverse(seed: int, d: int, rank: int, blocks: tuple[int, ...], exponent: int) -> None:
    torch.manual_seed(seed)
    root = torch.randn(*blocks, d, rank, dtype=F64)
    A, damping = root @ root.mT, 10.0**exponent
    before = A.clone()
    got = damped_inverse(A, damping)
    assert torch.equal(A, before)
    assert_close(got, ref.damped_inverse(A, damping), 1e-9)
    assert torch.equal(got, got.mT)
    assert (torch.linalg.eigvalsh(got) > 0).all()
    each = torch.full(blocks, damping, dtype=F64)
    assert torch.equal(damped_inverse(A, each), got)


@pytest.mark.parametrize("d", [1, 10, 100, 400])
@pytest.mark.parametrize("damping", [1e-6, 1e-12, 1e-30])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rank_one_with_tiny_damping_in_float32(d: int, damping: float, size: float) -> None:
    """Duplicated data, λ far below ε‖A‖: finite, symmetric, positive definite, never a failed factorization."""
    a = size * torch.randn(3, d)
    A = a.unsqueeze(-1) * a.unsqueeze(-2)
    H = damped_inverse(A, damping).double()
    assert torch.isfinite(H).all()
    assert (H - H.mT).abs().max() <= 1e-5 * H.abs().max()
    scale = H.abs().amax((-2, -1))
    assert (torch.linalg.eigvalsh((H + H.mT) / 2)[:, 0] > -1e-5 * scale).all()
    unit = (a / a.norm(dim=1, keepdim=True)).double()
    along = torch.einsum("bi,bij,bj->b", unit, H, unit)
    assert bool((along < 0.05 * scale).all()) or d == 1 or size < 1  # A is large along a, so H is small there


def test_batched_equals_one_at_a_time_and_takes_a_damping_for_each() -> None:
    A: Tensor = torch.randn(3, 5, 9, dtype=F64)
    A = A @ A.mT
    damping = torch.tensor([0.1, 1.0, 10.0], dtype=F64)
    got = damped_inverse(A, damping)
    for b in range(3):
        assert_close(got[b], damped_inverse(A[b], damping[b]), 1e-13)
        assert_close(got[b], ref.damped_inverse(A[b], float(damping[b])), 1e-12)


def test_not_finite_in_not_finite_out() -> None:
    A = torch.eye(3).repeat(2, 1, 1)
    A[0, 1, 1] = float("nan")
    H = damped_inverse(A, 1.0)
    assert not torch.isfinite(H[0]).all()
    assert_close(H[1], torch.eye(3) / 2, 1e-6)
