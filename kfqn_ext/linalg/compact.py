"""L-BFGS as a scaled identity plus a matrix of low rank, after Byrd, Nocedal and Schnabel (1994).

The last p pairs, each rescaled to sᵀy = 1, stand as rows of ``pairs`` = [S; Y], shape [*B, 2p, d], oldest first.
With H₀ = γI, the result of p BFGS updates from H₀ is::

    H = γI + [S; Y]ᵀ K [S; Y]

where K, [*B, 2p, 2p], depends on the products of the pairs alone. Products with a matrix then need two tall
matrix products instead of the two-loop recursion over p pairs. Rows of zeros are empty slots and change nothing.
"""

import torch
from torch import Tensor

from kfqn_ext.linalg.bfgs import rank_one_terms
from kfqn_ext.linalg.low_rank import add_terms_


def push_unit_pair(pairs: Tensor, s: Tensor, y: Tensor, kept: Tensor) -> Tensor:
    """Append a pair and drop the oldest one, where the pair is kept.

    Args:
        pairs: [S; Y], [*B, 2p, d].
        s: Step, [*B, d], rescaled by ``kfqn_ext.linalg.pairs.unit_pair_beside``.
        y: Change of the gradient along it, likewise.
        kept: Which pairs are usable, bool [*B, 1].

    Returns:
        The new [S; Y].
    """
    S, Y = pairs.chunk(2, dim=-2)
    pushed = torch.cat((S[..., 1:, :], s.unsqueeze(-2), Y[..., 1:, :], y.unsqueeze(-2)), dim=-2)
    return torch.where(kept.unsqueeze(-1), pushed, pairs)


def compact_middle(pairs: Tensor, gamma: Tensor | float) -> Tensor:
    """Compute the middle matrix K of the compact form.

    For pairs with sᵢᵀyᵢ = 1, with R the upper triangle of S Yᵀ (unit diagonal)::

        K = [[R⁻ᵀ (I + γ Y Yᵀ) R⁻¹, -γ R⁻ᵀ], [-γ R⁻¹, 0]]

    (Byrd, Nocedal and Schnabel 1994, Theorem 2.2). It is computed in float64: 2p × 2p numbers cost nothing, and the
    products of neighbouring pairs are close to each other.

    Args:
        pairs: [S; Y], [*B, 2p, d].
        gamma: Scale of H₀, a number or [*B].

    Returns:
        K, [*B, 2p, 2p].
    """
    S, Y = pairs.double().chunk(2, dim=-2)
    gamma = torch.as_tensor(gamma, dtype=S.dtype, device=S.device)[..., None, None]
    eye = torch.eye(S.shape[-2], dtype=S.dtype, device=S.device).expand(*S.shape[:-2], -1, -1)
    R_inv = torch.linalg.solve_triangular((S @ Y.mT).triu(1) + eye, eye, upper=True, unitriangular=True)
    corner = R_inv.mT @ (eye + gamma * (Y @ Y.mT)) @ R_inv
    top = torch.cat((corner, -gamma * R_inv.mT), dim=-1)
    bottom = torch.cat((-gamma * R_inv, torch.zeros_like(eye)), dim=-1)
    return torch.cat((top, bottom), dim=-2).to(pairs.dtype)


def dense_from_pairs(pairs: Tensor, gamma: Tensor) -> Tensor:
    """Form H by one BFGS update for each pair, from H₀ = γI, ``eq_23``: for d ≤ 2p, where H is smaller than K.

    Args:
        pairs: [S; Y] as :func:`push_unit_pair` keeps them, sᵢᵀyᵢ = 1 or empty, [*B, 2p, d].
        gamma: Scale of H₀, [*B].

    Returns:
        H, [*B, d, d].
    """
    d = pairs.shape[-1]
    H = torch.diag_embed(gamma.unsqueeze(-1).expand(*gamma.shape, d).to(pairs)).reshape(-1, d, d)
    S, Y = pairs.reshape(-1, *pairs.shape[-2:]).chunk(2, dim=-2)
    for s, y in zip(S.unbind(-2), Y.unbind(-2), strict=True):
        Hy = (H @ y.unsqueeze(-1)).squeeze(-1)
        q, p = rank_one_terms(s, Hy, (y * Hy).sum(-1, keepdim=True))
        add_terms_([H], [q.unsqueeze(0)], [p.unsqueeze(0)])
    return H.reshape(*pairs.shape[:-2], d, d)


def compact_product(pairs: Tensor, K: Tensor, gamma: Tensor | float, M: Tensor) -> Tensor:
    """Multiply H = γI + [S; Y]ᵀ K [S; Y] with a matrix: the "non-loop" product of ``sec_18``.

    Args:
        pairs: [S; Y], [*B, 2p, d].
        K: The middle matrix, [*B, 2p, 2p].
        gamma: Scale of H₀, a number or [*B].
        M: [*B, d, k].

    Returns:
        H M, [*B, d, k].
    """
    gamma = torch.as_tensor(gamma, dtype=M.dtype, device=M.device)[..., None, None]
    return gamma * M + pairs.mT @ (K @ (pairs @ M))


def compact_matrix(pairs: Tensor, K: Tensor, gamma: Tensor | float) -> Tensor:
    """Form H = γI + [S; Y]ᵀ K [S; Y] densely: for inspection, not for optimization.

    Args:
        pairs: [S; Y], [*B, 2p, d].
        K: The middle matrix, [*B, 2p, 2p].
        gamma: Scale of H₀, a number or [*B].

    Returns:
        H, [*B, d, d].
    """
    eye = torch.eye(pairs.shape[-1], dtype=pairs.dtype, device=pairs.device)
    return compact_product(pairs, K, gamma, eye.expand(*pairs.shape[:-2], -1, -1))
