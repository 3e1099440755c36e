"""Sums of Kronecker products over data and locations: ``thm_4`` and the two approximations that follow it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

from kfqn_ext.curvature.products import OutputGGN, OutputHessian


@dataclass(frozen=True)
class KroneckerSums:
    """A layer's block from the Hessian by its outputs, at two degrees of approximation, or from its Gauss-Newton part.

    Matrices are [G, p, p] with p = d_in · d_out in the paper's order, one a channel group.

    Attributes:
        exact: Σ over all pairs of locations, data included where they are coupled: ``thm_4``.
        by_datum: E_n[Σ_{t,t'} A_{t,t'}(n) ⊗ G_{t,t'}(n)]; ``exact`` itself unless data are coupled.
        G_tt: N ∂²f/∂h_t(n)², [N, T, G, d_out, d_out].
    """

    exact: Tensor
    by_datum: Tensor
    G_tt: Tensor


def kronecker_sums(hessian: OutputHessian | OutputGGN, progress: bool = False) -> KroneckerSums:
    """Sum A_{t,t'} ⊗ G_{t,t'} without keeping the G_{t,t'}: one row of the Hessian by the outputs at a time.

    Nor is any A_{t,t'} = a_t a_t'ᵀ, ``eq_5``, formed. Costs T · d_out products for independent data, N times as many
    for coupled data.

    Args:
        hessian: Products with the Hessian of f by the layer's outputs, or with its Gauss-Newton part. The sums of the
            latter are the Gauss-Newton block, and its G_{t,t} average to Γ.
        progress: Whether to show a progress bar.

    Returns:
        The sums.
    """
    return _coupled(hessian, progress) if hessian.coupled else _independent(hessian, progress)


def _rows(progress: bool, *sizes: int) -> Iterable[tuple[int, ...]]:
    places = list(product(*(range(size) for size in sizes)))
    bar: Iterable[tuple[int, ...]] = tqdm(places, desc="rows of ∂²f/∂h²", disable=not progress, leave=False)
    return bar


def _independent(hessian: OutputHessian | OutputGGN, progress: bool) -> KroneckerSums:
    """One product gives a row of every datum's Hessian."""
    a = hessian.a
    (N, T, groups, d_out), d_in = hessian.gradient.shape, a.shape[-1]
    block = a.new_zeros(groups, d_in, d_out, d_in * d_out)
    G_tt = a.new_empty(N, T, groups, d_out, d_out)
    v = torch.zeros_like(hessian.gradient)
    for t, b, i in _rows(progress, T, groups, d_out):
        v[:, t, b, i] = N
        G_row = hessian(v)[:, :, b]  # G_{t,t'}(n)[i, i'] for all n, t', i'
        v[:, t, b, i] = 0
        G_tt[:, t, b, i] = G_row[:, t]
        block[b, :, i] += a[:, t, b].T @ (a[:, :, b].mT @ G_row).flatten(1) / N
    block = block.flatten(1, 2)
    return KroneckerSums(block, block, G_tt)


def _coupled(hessian: OutputHessian | OutputGGN, progress: bool) -> KroneckerSums:
    """Every pair of data counts: each row belongs to one datum and reaches all others."""
    a = hessian.a
    (N, T, groups, d_out), d_in = hessian.gradient.shape, a.shape[-1]
    exact, by_datum = (a.new_zeros(groups, d_in, d_out, d_in * d_out) for _ in range(2))
    G_tt = a.new_empty(N, T, groups, d_out, d_out)
    v = torch.zeros_like(hessian.gradient)
    for n, t, b, i in _rows(progress, N, T, groups, d_out):
        v[n, t, b, i] = 1
        row = hessian(v)[:, :, b]
        v[n, t, b, i] = 0
        G_tt[n, t, b, i] = N * row[n, t]
        exact[b, :, i] += torch.outer(a[n, t, b], (a[:, :, b].flatten(0, 1).T @ row.flatten(0, 1)).flatten())
        by_datum[b, :, i] += torch.outer(a[n, t, b], (a[n, :, b].T @ row[n]).flatten())
    return KroneckerSums(exact.flatten(1, 2), by_datum.flatten(1, 2), G_tt)


def uncorrelated_locations(a: Tensor, G_tt: Tensor) -> Tensor:
    """E_n[Σ_t A_{t,t}(n) ⊗ G_{t,t}(n)], ``eq_{1.5}``.

    Args:
        a: Patches, [N, T, G, d_in].
        G_tt: [N, T, G, d_out, d_out].

    Returns:
        [G, p, p].
    """
    N = a.shape[0]
    # Σ_t over one datum at a time: all N · T matrices A_{t,t} at once would be large.
    return _sum(((a_n.unsqueeze(-1) * a_n.unsqueeze(-2)), G_n) for a_n, G_n in zip(a, G_tt, strict=True)) / N


def one_product_per_datum(a: Tensor, G_tt: Tensor) -> Tensor:
    """E_n[(Σ_t A_{t,t}(n)) ⊗ (mean_t G_{t,t}(n))], ``eq_2.5`` by ``eq_2``: arguments and result of ``eq_{1.5}``."""
    A = torch.einsum("ntgj,ntgk->ngjk", a, a)
    return _sum([(A, G_tt.mean(1))]) / a.shape[0]


def _sum(terms: object) -> Tensor:
    """Σ_m A_m ⊗ G_m over pairs of [M, G, d_in, d_in] and [M, G, d_out, d_out]: [G, p, p]."""
    total: Tensor | float = 0.0
    for A, G in terms:  # type: ignore[attr-defined]
        total = total + torch.einsum("mgjk,mgio->gjiko", A, G)
    assert isinstance(total, Tensor)
    return total.flatten(1, 2).flatten(2, 3)
