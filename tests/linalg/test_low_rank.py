"""Terms of several pairs in one matrix: in strips as entry by entry, and symmetric to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import bfgs_update_each_, bfgs_updates_each_, low_rank
from kfqn_ext.linalg.low_rank import add_terms_
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, assert_close

F64 = torch.float64


def symmetric(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=dtype)
    return root + root.mT


def dense(H: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """Term by term."""
    for minus, plus in zip(q, p, strict=True):
        H = H - minus.unsqueeze(-1) * minus.unsqueeze(-2) + plus.unsqueeze(-1) * plus.unsqueeze(-2)
    return H


@FEW_EXAMPLES
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.sampled_from([(1,), (4,), (5,), (8,), (13,), (2, 9), (3, 2)]), min_size=1, max_size=4),
    pairs=st.integers(1, 5),
)
def test_sums_of_terms(seed: int, shapes: list[tuple[int, ...]], pairs: int) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "_NARROW", 4)
        H = [symmetric(*shape) for shape in shapes]
        q, p = ([torch.randn(pairs, *shape, dtype=F64) for shape in shapes] for _ in range(2))
        expected, places = list(map(dense, H, q, p)), [matrix.data_ptr() for matrix in H]
        add_terms_(H, q, p)
    for matrix, sums, place in zip(H, expected, places, strict=True):
        assert_close(matrix, sums, 1e-13)
        assert torch.equal(matrix, matrix.mT) and matrix.data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_wide_inverse_by_several_pairs_is_that_by_each(dtype: torch.dtype) -> None:
    """In strips, with products found before the first pair, as by one pair after the other; symmetric to the bit."""
    torch.manual_seed(0)
    d, k = 700, 5
    curvature = symmetric(d, dtype=dtype) @ symmetric(d, dtype=dtype) / d
    curvature = curvature @ curvature.mT / d + torch.eye(d, dtype=dtype)
    s = torch.randn(k, 1, d, dtype=dtype)
    y = s @ curvature
    together, alone = torch.eye(d, dtype=dtype), torch.eye(d, dtype=dtype)
    kept = bfgs_updates_each_([together], s, y)
    assert kept.all() and torch.equal(together, together.mT)
    for pair in zip(s, y, strict=True):
        bfgs_update_each_([alone], *pair)
    tolerance = 1e-12 if dtype == F64 else 1e-4
    assert_close(together, alone, tolerance)
    assert_close(together @ y[-1, 0], s[-1, 0], tolerance)
    assert (torch.linalg.eigvalsh(together.double()) > 0).all()


def test_strips_are_taken_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide matrix of the host by several pairs; not of blocks, of few pairs, or where each strip is a launch."""
    taken: list[int] = []
    monkeypatch.setattr(low_rank, "_NARROW", 4)
    monkeypatch.setattr(low_rank, "_add_in_strips_", lambda H, q, p: taken.append(H.shape[-1]))

    def add(pairs: int, *shape: int) -> None:
        terms = [torch.randn(pairs, *shape)]
        add_terms_([symmetric(*shape, dtype=torch.float32)], terms, terms)

    add(5, 4), add(2, 9), add(5, 2, 9), add(3, 9)
    assert taken == [9]
    monkeypatch.setattr(low_rank, "is_on_host", lambda t: False)
    add(5, 11)
    assert taken == [9]


@pytest.mark.parametrize("condition", [1e5, 1e6])
def test_pairs_together_are_as_safe_in_float32_as_one_by_one(condition: float) -> None:
    """Of a matrix of such a condition that changes with the minibatch: H stays definite, and maps y to s as well."""
    worst: dict[bool, float] = {}
    for together in (True, False):
        torch.manual_seed(0)
        H, Q = 3 * torch.eye(64), torch.linalg.qr(torch.randn(64, 64, dtype=F64))[0]
        spectrum = torch.logspace(-1, torch.tensor(condition).log10().item() - 1, 64, dtype=F64)
        errors = []
        for _ in range(60):
            v = (torch.randn(5, 64, dtype=F64) * spectrum.sqrt()) @ Q.T
            s = v @ H.double()
            y = float(1 + 0.5 * torch.randn(()).abs()) * s @ (Q * spectrum) @ Q.T + 0.3 * s
            pairs = s.float().unsqueeze(1), y.float().unsqueeze(1)
            if together:
                bfgs_updates_each_([H], *pairs)
            else:
                for pair in zip(*pairs, strict=True):
                    bfgs_update_each_([H], *pair)
            assert (torch.linalg.eigvalsh(H.double()) > 0).all()
            errors.append(float((H.double() @ y[-1] - s[-1]).norm() / s[-1].norm()))
        worst[together] = max(errors)
    assert worst[True] < 3 * worst[False]


@pytest.mark.parametrize("which", [0, 1])
def test_a_pair_that_is_shortened_is_the_update_with_a_shorter_step(which: int) -> None:
    """With s / τ, by which the trace becomes a hundred times as large at most; as the first pair, or as a later one."""
    torch.manual_seed(0)
    H = symmetric(5) @ symmetric(5).mT
    H = H @ H.mT / 25 + torch.eye(5, dtype=F64)
    s = torch.randn(2, 5, dtype=F64)
    y = s @ (torch.eye(5, dtype=F64) + 0.1 * symmetric(5))
    y[which] *= 1e-6
    assert (s * y).sum(-1).min() > 0
    expected, taus = H.clone(), []
    for step, change in zip(s, y, strict=True):
        length = (step @ step) / (step @ change)
        taus.append(max(1.0, float(length / (100 * expected.trace()))))
        expected = ref.bfgs(expected, step / taus[-1], change)
    assert [tau > 1 for tau in taus] == [which == 0, which == 1]
    bfgs_updates_each_([H], s.unsqueeze(1), y.unsqueeze(1))
    assert_close(H, expected, 1e-9)
