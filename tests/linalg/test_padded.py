"""Vectors of several lengths side by side give what each gives alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg import bfgs_update_, bfgs_update_each_, bfgs_updates_each_
from kfqn_ext.linalg.padded import stack, times_each, unstack
from kfqn_ext.linalg.pairs import dot
from tests.cases import FEW_EXAMPLES, assert_close
from tests.linalg.test_bfgs import F64, spd, times

# Of layers without blocks, of any lengths; or with blocks, all of one shape.
kin = st.one_of(
    st.lists(st.integers(1, 9).map(lambda d: (d,)), min_size=1, max_size=5),
    st.tuples(st.sampled_from([(1,), (3,), (2, 3)]), st.integers(1, 5), st.integers(1, 4)).map(
        lambda t: [(*t[0], t[1])] * t[2]
    ),
)


def vectors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64) for shape in shapes]


@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), shapes=kin)
def test_stack_and_back(seed: int, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(seed)
    some, longest = vectors(shapes), max(shape[-1] for shape in shapes)
    stacked = stack(some)
    assert stacked.shape == (len(shapes), *shapes[0][:-1], longest)
    for v, row, back in zip(some, stacked, unstack(stacked, [shape[-1] for shape in shapes]), strict=True):
        assert torch.equal(v, back)
        assert not row[..., v.shape[-1] :].any()


@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), shapes=kin)
def test_products(seed: int, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(seed)
    some, matrices = vectors(shapes), [spd(*shape) for shape in shapes]
    for u, H, v in zip(times_each(matrices, stack(some)), matrices, some, strict=True):
        assert_close(u[..., : v.shape[-1]], times(H, v), 1e-12)
        assert not u[..., v.shape[-1] :].any()


@pytest.mark.parametrize("by", ["no", "sign", "nan", "size", "lost"])
@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), shapes=kin, spoiled=st.integers(0, 4))
def test_updates(by: str, seed: int, shapes: list[tuple[int, ...]], spoiled: int) -> None:
    """Of inverses together as one by one, also where one pair can't be used, or not with its inverse."""
    torch.manual_seed(seed)
    s, H = vectors(shapes), [spd(*shape) for shape in shapes]
    y = [times(spd(*v.shape), v) for v in s]
    spoiled %= len(s)
    y[spoiled].mul_({"sign": -1.0, "nan": float("nan")}.get(by, 1.0))
    # What the pair brings is nothing beside so large an inverse, and would drown so small an eigenvalue.
    H[spoiled].mul_(1e20 if by == "size" else 1.0)
    for rows in (H[spoiled], H[spoiled].mT):
        rows[..., 0, :] *= 1e-10 if by == "lost" else 1.0
    alone = [matrix.clone() for matrix in H]
    kept = bfgs_update_each_(H, stack(s), stack(y))
    for i, matrix in enumerate(alone):
        assert torch.equal(kept[i], bfgs_update_(matrix, s[i], y[i]))
        usable = by == "no" or i != spoiled or (by == "lost" and matrix.shape[-1] == 1)  # a number drowns in nothing
        assert kept[i].all() == usable
        assert_close(H[i], matrix, 1e-12)


@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), shapes=kin, spoiled=st.integers(0, 2))
def test_pairs_of_one_inverse_count_one_after_the_other(seed: int, shapes: list[tuple[int, ...]], spoiled: int) -> None:
    """Also where one of them can't be used: those that follow meet the H that the others have left."""
    torch.manual_seed(seed)
    H = [spd(*shape) for shape in shapes]
    s = torch.stack([stack(vectors(shapes)) for _ in range(3)])
    y = s * (0.5 + torch.rand_like(s))
    y[spoiled].neg_()
    alone = [matrix.clone() for matrix in H]
    kept = bfgs_updates_each_(H, s, y)
    for i, pair in enumerate(zip(s, y, strict=True)):
        assert torch.equal(kept[i], bfgs_update_each_(alone, *pair))
    assert not kept[spoiled].any()
    for matrix, other in zip(H, alone, strict=True):
        assert_close(matrix, other, 1e-12)


def test_a_later_pair_meets_the_size_that_the_earlier_has_left() -> None:
    """Beside the H before both it would be shortened, as one that makes the trace over a hundred times as large."""
    H = torch.eye(2, dtype=torch.float64)
    s = torch.diag(torch.tensor([100.0, 1000.0], dtype=torch.float64)).sqrt().unsqueeze(1)
    bfgs_updates_each_([H], s, s / dot(s, s))
    torch.testing.assert_close(H.diagonal(), torch.tensor([100.0, 1000.0], dtype=torch.float64))
