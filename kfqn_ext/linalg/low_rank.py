"""H - Σ q qᵀ + Σ p pᵀ in place, symmetric to the last bit where H is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kfqn_ext._torch import is_on_host

# A wider H is read from memory for every term; in strips it is read once for all. They pay from this many pairs on.
_NARROW, _SEVERAL = 512, 3


def add_terms_(matrices: Sequence[Tensor], q: Sequence[Tensor], p: Sequence[Tensor]) -> None:
    """Turn each H into H - Σ q qᵀ + Σ p pᵀ.

    Args:
        matrices: L symmetric matrices H, [*B, d_i, d_i]. Overwritten.
        q: k vectors of each, L times [k, *B, d_i].
        p: k vectors of each, likewise.
    """
    narrow = []
    for terms in zip(matrices, q, p, strict=True):
        if _is_wide(terms[0], len(terms[1])):
            _add_in_strips_(*terms)
        else:
            narrow.append(terms)
    if narrow:
        _add_by_entries_(*zip(*narrow, strict=True))


def _is_wide(H: Tensor, pairs: int) -> bool:
    """Whether so many pairs of terms are added in strips; on a GPU each of these is a launch."""
    return H.ndim == 2 and H.shape[-1] > _NARROW and pairs >= _SEVERAL and is_on_host(H)


def _add_by_entries_(matrices: Sequence[Tensor], q: Sequence[Tensor], p: Sequence[Tensor]) -> None:
    """All matrices by their first terms, then by their second ones.

    Entry by entry, so that each is rounded as its mirror image is: kernels of matrix products don't promise that.
    """
    signed = (-1, *_views(q)), (1, *_views(p))
    for i in range(len(q[0])):
        for sign, columns, rows in signed:
            torch._foreach_addcmul_(list(matrices), [c[i] for c in columns], [r[i] for r in rows], value=sign)


def _views(terms: Sequence[Tensor]) -> tuple[list[Sequence[Tensor]], list[Sequence[Tensor]]]:
    """L times k vectors as columns, and as rows."""
    return [v.unsqueeze(-1).unbind() for v in terms], [v.unsqueeze(-2).unbind() for v in terms]


def _add_in_strips_(H: Tensor, q: Tensor, p: Tensor) -> None:
    """One matrix by all its terms: squares on the diagonal, and products right of them, which are mirrored below."""
    left, right = torch.cat((q, p)).mT, torch.cat((-q, p))
    for start in range(0, len(H), _NARROW):
        own, rest = slice(start, start + _NARROW), slice(start + _NARROW, None)
        _add_by_entries_([H[own, own]], [q[:, own]], [p[:, own]])
        strip = H[own, rest].addmm_(left[own], right[:, rest])
        H[rest, own].copy_(strip.mT)
