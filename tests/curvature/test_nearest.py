"""The nearest Kronecker product: no other is nearer, and it is found dense and by Lanczos."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.curvature.krylov import nearest_kronecker_lanczos, nearest_kronecker_of_roots
from kfqn_ext.linalg.nearest import kron, nearest_kronecker, rearrange_kronecker
from tests.curvature.nets import F64

sizes = st.integers(1, 4)


def error(M: Tensor, A: Tensor, G: Tensor) -> float:
    return float(torch.linalg.matrix_norm(M - kron(A, G)).square().sum().sqrt())


def symmetric(d: int, *batch: int) -> Tensor:
    X = torch.randn(*batch, d, d, dtype=F64)
    return X + X.mT


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(0, 2**31), st.booleans())
def test_nothing_is_nearer(d_in: int, d_out: int, seed: int, definite: bool) -> None:
    """Not a random product, not a neighbour, not the averages that the paper takes; equal to the SVD's optimum."""
    torch.manual_seed(seed)
    pairs = [(symmetric(d_in), symmetric(d_out)) for _ in range(3)]
    if definite:
        pairs = [(A @ A, G @ G) for A, G in pairs]
    M = torch.stack([kron(A, G) for A, G in pairs]).mean(0)
    A, G = nearest_kronecker(M, d_out)
    best = error(M, A, G)
    slack = 1e-9 * float(torch.linalg.matrix_norm(M))
    mean_A, mean_G = (torch.stack(factors).mean(0) for factors in zip(*pairs, strict=True))
    others = [(mean_A, mean_G), *pairs, (torch.eye(d_in, dtype=F64), torch.eye(d_out, dtype=F64))]
    others += [(A + 1e-3 * symmetric(d_in), G), (A, G + 1e-3 * symmetric(d_out)), (1.001 * A, G)]
    assert all(best <= error(M, *other) + slack for other in others)
    singular = torch.linalg.svdvals(rearrange_kronecker(M, d_out))
    assert abs(best - float(torch.linalg.vector_norm(singular[1:]))) < 1e-7 * (1 + float(singular[0]))
    if definite:
        assert float(torch.linalg.eigvalsh(A).min()) > -1e-9 * float(A.norm())
        assert float(torch.linalg.eigvalsh(G).min()) > -1e-9 * float(G.norm())


def test_a_kronecker_product_is_found() -> None:
    """Batched; the factors have equal norms and a nonnegative trace of the first."""
    A, G = symmetric(4, 5), symmetric(3, 5)
    found_A, found_G = nearest_kronecker(kron(A, G), 3)
    torch.testing.assert_close(kron(found_A, found_G), kron(A, G))
    torch.testing.assert_close(torch.linalg.matrix_norm(found_A), torch.linalg.matrix_norm(found_G))
    assert (found_A.diagonal(dim1=-2, dim2=-1).sum(-1) >= 0).all()
    torch.testing.assert_close(kron(A[0], G[0]), torch.kron(A[0], G[0]))


def test_rearrangement_makes_products_rank_one() -> None:
    A, G = symmetric(3), symmetric(2)
    torch.testing.assert_close(rearrange_kronecker(torch.kron(A, G), 2), torch.outer(A.flatten(), G.flatten()))


def test_zero_and_misfits() -> None:
    A, G = nearest_kronecker(torch.zeros(6, 6), 2)
    assert not A.any() and not G.any()
    with pytest.raises(ValueError, match="no Kronecker factor of size d_out=4"):
        nearest_kronecker(torch.zeros(6, 6), 4)


@pytest.mark.parametrize(("d_in", "d_out"), [(5, 3), (3, 5), (4, 1), (1, 4)])
def test_lanczos_finds_the_same(d_in: int, d_out: int) -> None:
    """On the rearranged operator of a matrix, never rearranged, and of a sum of outer products, never formed."""
    roots = torch.randn(7, d_out, d_in, dtype=F64)
    flat = roots.mT.flatten(1)
    sigma = torch.tensor([1.0, -1, 1, 1, -1, 1, 1], dtype=F64)
    M = flat.T @ torch.diag(sigma) @ flat
    blocks = M.reshape(d_in, d_out, d_in, d_out)
    expected = kron(*nearest_kronecker(M, d_out))
    by_matrix = nearest_kronecker_lanczos(
        lambda X: torch.einsum("jiko,io->jk", blocks, X),
        lambda U: torch.einsum("jiko,jk->io", blocks, U),
        d_in,
        d_out,
        M,
    )
    torch.testing.assert_close(kron(*by_matrix), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kron(*nearest_kronecker_of_roots(roots, sigma)), expected, rtol=1e-5, atol=1e-6)
