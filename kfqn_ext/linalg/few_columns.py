"""Products with few vectors, which stand as rows: (Vᵀ Mᵀ)ᵀ in place of M V.

For wide matrices and two or five columns a CPU takes a quarter to a seventh of the time, and as long for one column
(``python -m benchmarks.ways``): its kernels work on strips of a result's rows, and M V has short ones.
"""

from torch import Tensor


def product(M: Tensor, V: Tensor) -> Tensor:
    """M V: [*B, m, n], [*B, n, k] → [*B, m, k], whose columns are contiguous."""
    return (V.mT @ M.mT).mT


def gram_product(rows: Tensor, V: Tensor) -> Tensor:
    """rowsᵀ rows V: [*B, N, d], [*B, d, k] → [*B, d, k], whose columns are contiguous."""
    return ((V.mT @ rows.mT) @ rows).mT
