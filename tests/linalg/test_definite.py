"""A matrix that is not definite is found and made so; one that is stays as it is."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import bfgs_update_, make_definite_
from tests.cases import FEW_EXAMPLES
from tests.linalg.test_bfgs import lost, spd, times

F64 = torch.float64
shapes = st.tuples(st.sampled_from([(), (1,), (3,), (2, 3)]), st.integers(1, 40))


def smallest(H: Tensor) -> Tensor:
    """The smallest eigenvalue in units of the diagonal, and of √d ε."""
    d, eps = H.shape[-1], torch.finfo(H.dtype).eps
    root = H.double().diagonal(dim1=-2, dim2=-1).rsqrt()
    return torch.linalg.eigvalsh(H.double() * root.unsqueeze(-1) * root.unsqueeze(-2))[..., 0] / (d**0.5 * eps)


def rotated(eigenvalues: Tensor, *blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A symmetric matrix that has these eigenvalues but for rounding."""
    d = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(*blocks, d, d, dtype=F64)).Q
    H = ((Q * eigenvalues) @ Q.mT).to(dtype)
    return ((H + H.mT) / 2).contiguous()


@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), shape=shapes, lowest=st.floats(-9, 0), scale=st.integers(-8, 8))
def test_a_check_leaves_H_definite(seed: int, shape: Any, lowest: float, scale: int) -> None:
    """Whatever its smallest eigenvalue was: by rounding, or as large as the others."""
    torch.manual_seed(seed)
    blocks, d = shape
    eigenvalues = torch.rand(d, dtype=F64) + 0.1
    eigenvalues[0] = -(10.0**lowest)
    units = 10.0 ** (scale * torch.rand(d))
    H = rotated(eigenvalues, *blocks) * (units * units.unsqueeze(-1))
    assert make_definite_(H).all()
    assert torch.equal(H, H.mT)
    assert (smallest(H) > 1).all()
    assert not make_definite_(H).any()


@pytest.mark.parametrize("d", [1, 2, 7, 65, 300])
def test_a_definite_H_stays_bit_for_bit(d: int) -> None:
    torch.manual_seed(d)
    H = rotated(torch.logspace(0, -4, d, dtype=F64), 3)
    H[1, 0, 0] = -1.0
    before = H.clone()
    assert make_definite_(H).tolist() == [False, True, False]
    assert torch.equal(H[::2], before[::2]) and not torch.equal(H[1], before[1])


def test_of_what_rounding_has_spoiled_the_rest_stays() -> None:
    torch.manual_seed(0)
    eigenvalues = torch.logspace(0, -3, 30, dtype=F64)
    eigenvalues[-1] = -1e-6
    H = rotated(eigenvalues, 100)
    before = H.clone()
    assert make_definite_(H).all()
    assert (H - before).abs().amax() < 2e-4
    assert (smallest(H) > 1).all()


def test_what_comes_before_the_failure_stays() -> None:
    """Where the diagonal alone does not help."""
    torch.manual_seed(0)
    H = spd(9, dtype=torch.float32)
    before = H.clone()
    H[6, 8] = H[8, 6] = 3.0
    assert make_definite_(H)
    torch.testing.assert_close(H[:8, :8], before[:8, :8], rtol=2e-4, atol=0)
    assert torch.equal(H[8, :8], torch.zeros(8)) and H[8, 8] >= before[8, 8]


@pytest.mark.parametrize("value", [0.0, -1e-9, -1.0])
def test_a_diagonal_that_is_not_positive(value: float) -> None:
    """Its units say nothing then, and no pair with such an input was ever kept again."""
    torch.manual_seed(0)
    B, H = spd(6, dtype=torch.float32), 3.0 * torch.eye(6)
    H[2, 2] = value
    s = torch.randn(6)
    assert not bfgs_update_(H.clone(), s, times(B, s))
    assert make_definite_(H)
    assert H[2, 2] > 1
    assert bfgs_update_(H, s, times(B, s))


@pytest.mark.parametrize("H", [torch.zeros(3, 3), -torch.eye(3), torch.ones(3, 3)])
def test_nothing_is_left(H: Tensor) -> None:
    assert make_definite_(H)
    assert (smallest(H) > 1).all()


def test_float64_has_a_margin_of_its_own() -> None:
    torch.manual_seed(0)
    H = rotated(torch.logspace(0, -10, 20, dtype=F64), dtype=F64)
    before = H.clone()
    assert not make_definite_(H)
    assert torch.equal(H, before)
    assert make_definite_(H.float())


def drifting(d: int, runs: int, steps: int, every: int | None) -> tuple[int, int]:
    """Runs of H_A that are indefinite at the end, and that were for more than 16 updates, as A grows and shrinks.

    By a factor of e in a step: pairs of small batches ask for eigenvalues of many sizes, and are kept.
    """
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    roots, size = (1e6 * torch.logspace(0, -8, d)).sqrt(), torch.ones(runs)
    H, Q, age = torch.eye(d).repeat(runs, 1, 1), torch.linalg.qr(randn(runs, d, d)).Q, torch.zeros(runs)
    longest = age
    for k in range(1, steps + 1):
        turn = 0.05 * randn(runs, d, d)
        Q = torch.linalg.qr(Q + Q @ (turn - turn.mT) / d**0.5).Q
        size = (size * torch.exp(randn(runs))).clamp(1e-3, 1e3)
        a = ((randn(runs, 64, d) + torch.eye(d)[0]) * roots * size.sqrt()[:, None, None]) @ Q.mT
        if every is not None and k % every == 0:
            make_definite_(H)
            assert not lost(H).any()
        s = times(H, a.mean(1))
        bfgs_update_(H, s, times(a.mT, times(a, s)) / 64 + s)
        age = torch.where(lost(H), age + 1, 0)
        longest = torch.maximum(longest, age)
    return int((age > 0).sum()), int((longest > 16).sum())


@pytest.mark.parametrize("d", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_runs_that_drift_are_lost_for_one_interval_at_most(d: int) -> None:
    end, long = drifting(d, runs=400, steps=200, every=None)
    assert end > 5 and long > 5
    end, long = drifting(d, runs=400, steps=200, every=16)
    assert end <= 5 and long == 0
