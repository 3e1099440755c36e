"""The BFGS update of an inverse, ``eq_13`` of the paper."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfqn_ext.linalg import few_columns
from kfqn_ext.linalg.low_rank import add_terms_
from kfqn_ext.linalg.padded import stack, unstack
from kfqn_ext.linalg.pairs import RESOLUTION, dot, overlong, unit_pair

# One update makes H at most this many times as large. In more, small eigenvalues drown that its diagonal hides.
_GROWTH = 100.0


def bfgs_updates_each_(inverses: Sequence[Tensor], s: Tensor, y: Tensor) -> Tensor:
    """Update approximate inverses of several sizes in place by k pairs, one after the other.

    Each pair makes H map its y to its s. With ρ = 1 / sᵀy::

        H⁺ = (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ

    computed as ``H - q qᵀ + p pᵀ`` with ``a² = 1 + yᵀHy``, ``q = Hy / a`` and ``p = a s - q`` for the pair rescaled to
    sᵀy = 1: one product with H and two rank-1 terms, and no power of ρ to overflow. ``H - q qᵀ`` is (H⁻¹ + y yᵀ)⁻¹, so
    that no intermediate result is indefinite. H is read once for all pairs: what earlier ones change in H y follows
    from their q and p. A symmetric H stays so to the last bit: an asymmetry would be left behind where H shrinks, and
    would grow beside it.

    Where the pair is kept, H⁺ is as positive definite as H, and H⁺y = s; elsewhere H does not change. A pair is kept
    where :func:`kfqn_ext.linalg.pairs.unit_pair` keeps it, and where H⁺ can tell its smallest eigenvalue from its
    rounding error. Both are counted in units of H's diagonal, D, in which rounding is relative. An eigenvalue 1 of H
    becomes 1 / (1 + yᵀDy) at least, and what is added has the norm sᵀD⁻¹s (1 + yᵀHy) at most. Smaller eigenvalues
    than 1 can't be seen without a factorization, and where curvature grows and shrinks by orders of magnitude, float32
    may lose them: :func:`kfqn_ext.linalg.make_definite_` is to look at H now and then. A pair that would make the trace
    more than a hundred times as large is shortened, H⁺y = s/τ with τ > 1: the next ones go on.

    Args:
        inverses: L symmetric positive definite matrices H, [*B, d_i, d_i]. Overwritten.
        s: Steps, [k, L, *B, d], padded: ``kfqn_ext.linalg.padded.stack``.
        y: Changes of the gradients along them, [k, L, *B, d], padded.

    Returns:
        Which pairs were kept, bool [k, L, *B].
    """
    diagonal = stack(H.diagonal(dim1=-2, dim2=-1) for H in inverses)
    s, y, kept = unit_pair(s, y)
    Hy = _products(inverses, y)
    usable = []
    for i in range(len(s)):
        later = slice(i + 1, None)
        q, p, used = _terms(s[i], y[i], Hy[i], kept[i], diagonal)
        _add_products_(Hy[later], y[later], q, p)
        diagonal.addcmul_(q, q, value=-1).addcmul_(p, p)
        Hy[i], s[i] = q, p  # in the places of what is needed no longer
        usable.append(used)
    sizes = [H.shape[-1] for H in inverses]
    add_terms_(inverses, *(unstack(v.movedim(1, 0), sizes) for v in (Hy, s)))
    return torch.stack(usable).squeeze(-1)


def _products(inverses: Sequence[Tensor], y: Tensor) -> Tensor:
    """H y of each H with its vectors, [k, L, *B, d], padded: an H is read once for all."""
    # A copy where several vectors are apart in y: rounding must not depend on where a layer stands among others.
    rows = (y[:, i, ..., : H.shape[-1]].movedim(0, -2).contiguous() for i, H in enumerate(inverses))
    columns = map(few_columns.product, inverses, (v.mT for v in rows))
    return stack(columns).movedim(-1, 0).contiguous()


def _add_products_(Hy: Tensor, y: Tensor, q: Tensor, p: Tensor) -> None:
    """Make of H y what it is after a pair whose terms are q and p, [L, *B, d], for later pairs, [k, L, *B, d]."""
    if len(y):
        Hy.addcmul_(q, dot(q, y), value=-1).addcmul_(p, dot(p, y))


def _terms(s: Tensor, y: Tensor, Hy: Tensor, kept: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms q and p of a pair with sᵀy = 1, and whether it is used, [L, *B, 1]; zeros where it is not, [L, *B, d]."""
    root = overlong(s, _GROWTH * diagonal.sum(-1, keepdim=True)).sqrt()
    s, y, Hy = s / root, y * root, Hy * root
    yHy = dot(y, Hy)
    precision = torch.finfo(s.dtype)
    shrinks = 1.0 + dot(y, y * diagonal)
    grows = 1.0 + dot(s, s / diagonal.clamp(min=precision.tiny)) * (1.0 + yHy.abs())
    # What is not finite compares as false.
    usable = kept & (RESOLUTION * precision.eps * grows * shrinks < 1)
    q, p = rank_one_terms(s, Hy, yHy)
    return torch.where(usable, q, 0.0), torch.where(usable, p, 0.0), usable


def bfgs_update_each_(inverses: Sequence[Tensor], s: Tensor, y: Tensor) -> Tensor:
    """Update by one pair each: :func:`bfgs_updates_each_`.

    Args:
        inverses: L symmetric positive definite matrices H, [*B, d_i, d_i]. Overwritten.
        s: Steps, [L, *B, d], padded.
        y: Changes of the gradients along them, [L, *B, d], padded.

    Returns:
        Which pairs were kept, bool [L, *B].
    """
    return bfgs_updates_each_(inverses, s.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def rank_one_terms(s: Tensor, Hy: Tensor, yHy: Tensor) -> tuple[Tensor, Tensor]:
    """Give q and p of an update H - q qᵀ + p pᵀ: of a pair with sᵀy = 1, or of zeros.

    A negative yᵀHy tells of an H that has lost its definiteness to rounding. There s sᵀ alone is added, which brings
    yᵀHy above zero again.

    Args:
        s: [*B, d].
        Hy: [*B, d].
        yHy: yᵀHy, [*B, 1].
    """
    a = (1.0 + yHy.clamp(min=0.0)).sqrt()
    q = torch.where(yHy >= 0, Hy / a, 0.0)
    return q, a * s - q


def bfgs_update_(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Update one approximate inverse in place; see :func:`bfgs_updates_each_`.

    Args:
        H: Symmetric positive definite, [*B, d, d]. Overwritten.
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].

    Returns:
        Which pairs were kept, bool [*B].
    """
    return bfgs_update_each_([H], s.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def bfgs_update(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return the updated inverse and leave ``H`` as it is; otherwise :func:`bfgs_update_`.

    Example:
        >>> import torch
        >>> H = bfgs_update(torch.eye(2), torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        >>> torch.allclose(H, torch.tensor([[0.25, 0.0], [0.0, 1.0]]))
        True

    Args:
        H: Symmetric positive definite, [*B, d, d].
        s: Step, [*B, d].
        y: Change of the gradient along it, [*B, d].

    Returns:
        H⁺, [*B, d, d].
    """
    H = H.clone(memory_format=torch.contiguous_format)
    bfgs_update_(H, s, y)
    return H
