"""An inverse that is kept as a scaled identity and the last p pairs: state of the limited-memory sides."""

from torch import Tensor

from kfqn_ext.linalg import compact_middle, compact_product, push_pair
from kfqn_ext.optim.sides.base import State


def start_pairs(state: State, side: str, like: Tensor, memory: int, damping: Tensor) -> None:
    """Start from I / damping without pairs; ``like``, [*B, d], gives shape, dtype and device."""
    *blocks, d = like.shape
    state[f"pairs_{side}"] = like.new_zeros(*blocks, 2 * memory, d)
    state[f"K_{side}"] = like.new_zeros(*blocks, 2 * memory, 2 * memory)
    state[f"gamma_{side}"] = (1.0 / damping).to(like).clone()


def update_pairs(state: State, side: str, s: Tensor, y: Tensor, damping: Tensor) -> Tensor:
    """Append a pair where it is usable; return where, bool [*B]."""
    gamma = state[f"gamma_{side}"].copy_(1.0 / damping)
    pairs, kept = push_pair(state[f"pairs_{side}"], s, y, norm_H=gamma.unsqueeze(-1))
    state[f"pairs_{side}"] = pairs
    state[f"K_{side}"] = compact_middle(pairs, gamma)
    return kept


def times_pairs(state: State, side: str, M: Tensor) -> Tensor:
    """H M for the kept inverse: [*B, d, k] → [*B, d, k]."""
    return compact_product(state[f"pairs_{side}"], state[f"K_{side}"], state[f"gamma_{side}"], M)
