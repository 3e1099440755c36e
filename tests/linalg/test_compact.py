"""L-BFGS in compact form equals the recursion over its pairs, written densely."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import compact_matrix, compact_middle, compact_product, dense_from_pairs, powell_lm
from kfqn_ext.linalg.compact import push_unit_pair
from kfqn_ext.linalg.pairs import unit_pair_beside
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, assert_close

F64 = torch.float64
P, D = 4, 7
ONE = torch.ones(1, dtype=F64)


def good_pair(*shape: int) -> tuple[Tensor, Tensor]:
    s = torch.randn(*shape, D, dtype=F64)
    return s, s * (0.5 + torch.rand(D, dtype=F64)) + 0.1 * torch.randn(*shape, D, dtype=F64)


def push(pairs: Tensor, s: Tensor, y: Tensor, norm_H: Tensor) -> tuple[Tensor, Tensor]:
    """As the limited-memory sides do: rescale or empty, append where usable; and where that was, bool [*B]."""
    s, y, kept = unit_pair_beside(s, y, norm_H)
    return push_unit_pair(pairs, s, y, kept), kept.squeeze(-1)


def run(kinds: list[str]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Push pairs; the recursion's list has those that count."""
    pairs, kept = torch.zeros(2 * P, D, dtype=F64), []
    for kind in kinds:
        s, y = good_pair()
        if kind == "negative":
            y = -y
        elif kind == "zero":
            s, y = 0 * s, 0 * y
        elif kind == "nan":
            y = y * float("nan")
        elif kind == "tiny":
            s, y = s * 1e-200, y * 1e-200
        else:
            kind = "good"
        pairs, ok = push(pairs, s, y, ONE)
        assert ok.item() is (kind in ("good", "tiny"))
        if ok:
            kept.append((s, y) if kind == "good" else (s * 1e200, y * 1e200))
    return pairs, kept[-P:]


@FEW_EXAMPLES
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(["good", "good", "good", "negative", "zero", "nan", "tiny"]), max_size=3 * P),
    exponent=st.integers(-3, 3),
)
def test_equals_the_recursion(seed: int, kinds: list[str], exponent: int) -> None:
    torch.manual_seed(seed)
    gamma = 10.0**exponent
    pairs, kept = run(kinds)
    want = ref.lbfgs(gamma * torch.eye(D, dtype=F64), kept)
    K = compact_middle(pairs, gamma)
    assert_close(compact_matrix(pairs, K, gamma), want, 1e-9)
    assert_close(dense_from_pairs(pairs, torch.tensor(gamma, dtype=F64)), want, 1e-9)
    M = torch.randn(D, 3, dtype=F64)
    assert_close(compact_product(pairs, K, gamma, M), want @ M, 1e-9, want.abs() @ M.abs())
    if kept:
        s, y = kept[-1]
        assert_close(compact_product(pairs, K, gamma, y[:, None])[:, 0], s, 1e-9, want.abs() @ y.abs())


@pytest.mark.parametrize("number", [0, 1, P - 1, P, P + 1, 3 * P])
def test_number_of_pairs(number: int) -> None:
    pairs, kept = run(["good"] * number)
    assert len(kept) == min(number, P) == int((pairs[:P].abs().sum(1) > 0).sum())
    got = compact_matrix(pairs, compact_middle(pairs, 2.0), 2.0)
    assert_close(got, ref.lbfgs(2 * torch.eye(D, dtype=F64), kept), 1e-10)
    assert_close(dense_from_pairs(pairs, torch.tensor(2.0, dtype=F64)), got, 1e-10)
    if number == 0:
        assert torch.equal(got, 2 * torch.eye(D, dtype=F64))


def test_a_rejected_pair_leaves_the_others_in_place() -> None:
    pairs, _ = run(["good"] * (P + 1))
    s, y = good_pair()
    after, kept = push(pairs, s, -y, ONE)
    assert torch.equal(after, pairs) and not kept


def test_batched_equals_one_at_a_time() -> None:
    B, gamma = 3, torch.tensor([0.5, 1.0, 20.0], dtype=F64)
    together, alone = torch.zeros(B, 2 * P, D, dtype=F64), [torch.zeros(2 * P, D, dtype=F64) for _ in range(B)]
    for step in range(P + 2):
        s, y = good_pair(B)
        y[step % B] *= -1 if step % 2 else 1
        together, kept = push(together, s, y, ONE.expand(B, 1))
        for b in range(B):
            alone[b], one = push(alone[b], s[b], y[b], ONE)
            assert one == kept[b]
    M = torch.randn(B, D, 2, dtype=F64)
    K, dense = compact_middle(together, gamma), dense_from_pairs(together, gamma)
    for b in range(B):
        K_b = compact_middle(alone[b], gamma[b])
        assert_close(together[b], alone[b], 1e-15)
        assert_close(compact_matrix(together, K, gamma)[b], compact_matrix(alone[b], K_b, gamma[b]), 1e-12)
        assert_close(dense[b], dense_from_pairs(alone[b], gamma[b]), 1e-12)
        assert_close(compact_product(together, K, gamma, M)[b], compact_product(alone[b], K_b, gamma[b], M[b]), 1e-12)


@pytest.mark.parametrize("form", ["compact", "dense"])
@pytest.mark.parametrize("kind", ["noise", "repeated", "negative", "shrinking", "any size"])
def test_float32_stays_definite_over_many_damped_pairs(kind: str, form: str) -> None:
    """As the optimizer uses it: powell_lm on H y, p = 20 pairs in 12 dimensions, hence linearly dependent."""
    torch.manual_seed(0)
    d, p, mu2, steps = 12, 20, 0.3, 300
    pairs, gamma = torch.zeros(2 * p, d), torch.tensor(1 / mu2)
    H = gamma * torch.eye(d)
    s, y = torch.randn(2, d)
    for step in range(steps):
        new: Any = torch.randn(2, d)
        decay = 0.99 if kind == "repeated" else 0.9  # of moving averages: neighbouring pairs are alike
        s, y = decay * s + (1 - decay) * new[0], decay * y + (1 - decay) * new[1]
        a, b = s, -s + 0.1 * y if kind == "negative" else y
        scale = {"shrinking": 0.9**step, "any size": 10.0 ** int(torch.randint(-15, 16, ()))}.get(kind, 1.0)
        a, b = a * scale, b * scale
        pairs, _ = push(pairs, *powell_lm(a, b, H @ b, 0.2, mu2), gamma.reshape(1))
        H = (
            dense_from_pairs(pairs, gamma)
            if form == "dense"
            else compact_matrix(pairs, compact_middle(pairs, gamma), gamma)
        )
        if step % 10 == 9:
            exact = H.double()
            assert (H - H.mT).abs().max() <= 1e-3 * H.abs().max()  # compact: two products, symmetric to their rounding
            smallest = torch.linalg.eigvalsh((exact + exact.mT) / 2)[0]
            assert smallest > 0, (step, smallest.item())
