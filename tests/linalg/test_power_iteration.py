"""Spectral norms of matrices that change slowly, against those of torch and one iteration written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.linalg.power_iteration import spectral_norms_, start_vector
from tests.cases import FEW_EXAMPLES, assert_close
from tests.optim import untuned_twins as twins

F64 = torch.float64
OPEN, CLOSED = torch.tensor(False), torch.tensor(True)
SHAPES: list[list[tuple[int, ...]]] = [[(7, 5), (5, 7), (1, 4), (6, 1), (40, 30)], [(3, 4, 5)] * 2]


def matrices(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def starts(some: list[Tensor]) -> list[Tensor]:
    return [start_vector(P.flatten(0, -2)[0], P.shape[:-2]) for P in some]


def true_norms(some: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.matrix_norm(P, 2).max() for P in some])


@pytest.mark.parametrize("shapes", SHAPES, ids=["of different sizes", "with blocks"])
def test_it_finds_the_norm_of_a_matrix_that_changes_slowly(shapes: list[tuple[int, ...]]) -> None:
    """From below, with one iteration at each change."""
    first, other = matrices(shapes), matrices(shapes)
    vectors = starts(first)
    for angle in torch.linspace(0.0, 0.1, 100, dtype=F64):
        some = [torch.cos(angle) * P + torch.sin(angle) * Q for P, Q in zip(first, other, strict=True)]
        found, wanted = spectral_norms_(some, vectors, OPEN), true_norms(some)
        assert (found <= wanted * (1 + 1e-12)).all()
    assert (found >= wanted * (1 - 1e-3)).all()
    assert all(torch.allclose(u.norm(dim=-1), torch.ones((), dtype=F64)) for u in vectors)


@FEW_EXAMPLES
@given(seed=st.integers(0, 2**31), kind=st.integers(0, 1), iterations=st.integers(1, 4))
def test_iterations_equal_those_that_are_written_out(seed: int, kind: int, iterations: int) -> None:
    torch.manual_seed(seed)
    some = matrices(SHAPES[kind])
    vectors = starts(some)
    want = [twins.power_iteration(P, twins.start_vectors(P), iterations) for P in some]
    found = spectral_norms_(some, vectors, OPEN, iterations)
    assert_close(found, torch.tensor([norm for norm, _ in want], dtype=F64), 1e-12)
    for u, (_, v) in zip(vectors, want, strict=True):
        assert_close(u, v, 1e-10)


def test_blocks_have_the_norm_of_their_block_diagonal_matrix() -> None:
    P = torch.randn(3, 4, 5, dtype=F64)
    found = spectral_norms_([P], starts([P]), OPEN, iterations=200)
    assert_close(found, torch.linalg.matrix_norm(torch.block_diag(*P), 2).unsqueeze(0), 1e-10)


def test_zero_does_not_lose_the_vector() -> None:
    """Neither of a whole matrix nor of one block, beside others that move on."""
    P, Q = matrices([(2, 4, 5), (2, 4, 5)])
    P[1] = 0.0
    vectors = starts([P, Q])
    before = [u.clone() for u in vectors]
    found = spectral_norms_([P, torch.zeros_like(Q)], vectors, OPEN)
    assert torch.equal(vectors[0][1], before[0][1]) and not torch.equal(vectors[0][0], before[0][0])
    assert torch.equal(vectors[1], before[1])
    assert found[0] > 0 and found[1] == 0
    assert (spectral_norms_([P + 1, Q], vectors, OPEN) > 0).all()


def test_a_matrix_that_is_not_finite_does_not_lose_the_vector() -> None:
    P = torch.full((4, 5), float("nan"), dtype=F64)
    vectors = starts([P])
    before = vectors[0].clone()
    spectral_norms_([P], vectors, OPEN)
    assert torch.equal(vectors[0], before)


def test_vectors_that_are_to_be_left_alone() -> None:
    """The norm is what it would be; the vector is that of the last good minibatch."""
    P = torch.randn(4, 5, dtype=F64)
    vectors, kept = starts([P]), starts([P])
    before = kept[0].clone()
    assert torch.equal(spectral_norms_([P], vectors, OPEN), spectral_norms_([P], kept, CLOSED))
    assert torch.equal(kept[0], before) and not torch.equal(vectors[0], before)
