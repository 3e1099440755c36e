"""The Kronecker product that is nearest to a matrix, after Van Loan and Pitsianis (1993)."""

import torch
from torch import Tensor


def kron(A: Tensor, G: Tensor) -> Tensor:
    """A ⊗ G, formed: [*B, d_in, d_in], [*B, d_out, d_out] → [*B, p, p] with p = d_in · d_out.

    It multiplies vec(W), the columns of W [d_out, d_in] stacked: (A ⊗ G) vec(W) = vec(G W Aᵀ).
    """
    p = A.shape[-1] * G.shape[-1]
    return torch.einsum("...jk,...io->...jiko", A, G).reshape(*A.shape[:-2], p, p)


def rearrange_kronecker(M: Tensor, d_out: int) -> Tensor:
    """Rearrange a matrix so that Kronecker products become matrices of rank one: R(A ⊗ G) = vec(A) vec(G)ᵀ.

    Args:
        M: [*B, p, p] with p = d_in · d_out, its index the paper's: column of W slow, row of W fast.
        d_out: Size of the second factor.

    Returns:
        R(M), [*B, d_in², d_out²]; the Frobenius norm is M's.
    """
    d_in, batch = M.shape[-1] // d_out, M.shape[:-2]
    return M.reshape(*batch, d_in, d_out, d_in, d_out).transpose(-3, -2).reshape(*batch, d_in**2, d_out**2)


def nearest_kronecker(M: Tensor, d_out: int) -> tuple[Tensor, Tensor]:
    """Find A and G that minimize ‖M - A ⊗ G‖_F: the leading singular triple of the rearranged matrix.

    The triple comes from the smaller Gram matrix of R(M). Squaring costs no accuracy at the largest singular value.
    For a symmetric positive semidefinite M, A and G are symmetric positive semidefinite.

    Args:
        M: [*B, p, p].
        d_out: Size of the second factor; the first has p / d_out.

    Returns:
        A [*B, d_in, d_in] and G [*B, d_out, d_out], of equal Frobenius norm, with tr(A) ≥ 0.

    Raises:
        ValueError: If p is not a multiple of ``d_out``.
    """
    if M.shape[-1] != M.shape[-2] or M.shape[-1] % d_out:
        raise ValueError(f"A matrix of shape {list(M.shape)} has no Kronecker factor of size d_out={d_out}.")
    d_in = M.shape[-1] // d_out
    R = rearrange_kronecker(M, d_out)
    wide = R.shape[-2] < R.shape[-1]
    R = R.mT if wide else R  # tall: the Gram matrix RᵀR is the smaller one
    v = torch.linalg.eigh(R.mT @ R).eigenvectors[..., -1:]
    u = _unit(R @ v)
    v = R.mT @ u  # σ v, one power step more precise
    a, g = (v, u) if wide else (u, v)
    sigma = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    scale = torch.where(sigma > 0, sigma, 1.0).rsqrt()
    A, G = a * (scale if wide else sigma.sqrt()), g * (sigma.sqrt() if wide else scale)
    A, G = A.reshape(*M.shape[:-2], d_in, d_in), G.reshape(*M.shape[:-2], d_out, d_out)
    sign = torch.where(A.diagonal(dim1=-2, dim2=-1).sum(-1) < 0, -1.0, 1.0)[..., None, None]
    return A * sign, G * sign


def _unit(u: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True)
    return u / torch.where(norm > 0, norm, 1.0)
