"""Products with few vectors, which stand as rows: (Vᵀ Mᵀ)ᵀ in place of M V.

A CPU takes half to a seventh of the time for these where V has two to some ten columns, and as long where it has one
(``python -m benchmarks.ways``): its kernels work on strips of a result's rows, and M V has short ones.
"""

from torch import Tensor


def product(M: Tensor, V: Tensor) -> Tensor:
    """M V: [*B, m, n], [*B, n, k] → [*B, m, k], whose columns are contiguous."""
    return (V.mT @ M.mT).mT


def gram_product(rows: Tensor, V: Tensor) -> Tensor:
    """rowsᵀ rows V: [*B, N, d], [*B, d, k] → [*B, d, k], whose columns are contiguous."""
    return ((V.mT @ rows.mT) @ rows).mT
