"""An inverse that is kept as a scaled identity and the last p pairs: state of the limited-memory inverses.

Products use the compact form with its 2p × 2p matrix K. Where the inverse itself is no larger, d ≤ 2p, it is formed
from the pairs at each update instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.linalg import compact_middle, compact_product, dense_from_pairs
from kfqn_ext.linalg.compact import push_unit_pair
from kfqn_ext.linalg.padded import stack, unstack
from kfqn_ext.linalg.pairs import unit_pair_beside
from kfqn_ext.optim.inverses.base import State
from kfqn_ext.optim.numbers import integer, is_count


def checked_history_size(history_size: Any) -> int:
    """P as an integer of Python's; raise a ValueError where it is no count of pairs."""
    p = integer(history_size)
    if not is_count(p):
        raise ValueError(
            f"Invalid history_size: {history_size}. It must be an integer of at least 1: how many pairs are kept."
        )
    return int(p)


def start_pairs(state: State, which: str, like: Tensor, history_size: int, gamma: Tensor) -> None:
    """Start H_A or H_G, as ``which`` says, from γI without pairs; ``like``: [*B, d]."""
    *blocks, d = like.shape
    state[f"pairs_{which}"] = like.new_zeros(*blocks, 2 * history_size, d)
    state[f"gamma_{which}"] = gamma.to(like).clone()
    _form([state], which)


def divide(states: Sequence[State], which: str, factor: Tensor) -> None:
    """H ← H / c, with the pairs and γ that it is made from; c: [L, *B]."""
    for state, c in zip(states, factor[..., None, None], strict=True):
        S, Y = state[f"pairs_{which}"].chunk(2, dim=-2)
        p = S.shape[-2]
        state[f"pairs_{which}"] = torch.cat((S / c.sqrt(), Y * c.sqrt()), dim=-2)
        state[f"gamma_{which}"].div_(c[..., 0, 0])
        H = state.get(f"H_{which}")
        if H is not None:
            H.div_(c)
        else:  # of K's blocks only those beside the diagonal have a unit
            K = state[f"K_{which}"]
            K[..., :p, p:].div_(c)
            K[..., p:, :p].div_(c)


def update_pairs(states: Sequence[State], which: str, s: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    """Append each layer's pair where it is usable, on top of γI; return where, bool [L, *B]."""
    s, y, kept = unit_pair_beside(s, y, gamma.to(s).unsqueeze(-1))
    sizes = [state[f"pairs_{which}"].shape[-1] for state in states]
    pairs = zip(unstack(s, sizes), unstack(y, sizes), kept, strict=True)
    for state, pair, scale in zip(states, pairs, gamma, strict=True):
        state[f"gamma_{which}"].copy_(scale)
        state[f"pairs_{which}"] = push_unit_pair(state[f"pairs_{which}"], *pair)
    _form(states, which)
    return kept.squeeze(-1)


def _form(states: Sequence[State], which: str) -> None:
    """Make what products use: K of each layer, or H, for all layers at once, as it takes p updates one by one."""
    small = []
    for state in states:
        pairs = state[f"pairs_{which}"]
        if pairs.shape[-1] <= pairs.shape[-2]:
            small.append(state)
        else:
            state[f"K_{which}"] = compact_middle(pairs, state[f"gamma_{which}"])
    if small:
        pairs = stack(state[f"pairs_{which}"].mT for state in small).mT
        inverses = dense_from_pairs(pairs, torch.stack([state[f"gamma_{which}"] for state in small]))
        for state, H in zip(small, inverses, strict=True):
            d = state[f"pairs_{which}"].shape[-1]
            state[f"H_{which}"] = H[..., :d, :d].clone(memory_format=torch.contiguous_format)  # not all layers' memory


def times_pairs(state: State, which: str, M: Tensor) -> Tensor:
    """H M for the kept inverse: [*B, d, k] → [*B, d, k], in the dtype of what the state holds."""
    H = state.get(f"H_{which}")
    if H is not None:
        return H @ M.to(H.dtype)
    pairs = state[f"pairs_{which}"]
    return compact_product(pairs, state[f"K_{which}"], state[f"gamma_{which}"], M.to(pairs.dtype))
