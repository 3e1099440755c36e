"""When it is looked whether inverses that learn pair by pair are still definite."""

from collections.abc import Sequence

from kfqn_ext.linalg import make_definite_
from kfqn_ext.optim.groups.hyperparameters import update_freq
from kfqn_ext.optim.groups.plan import Block

_SHORTEST = 16


def interval(d: int) -> int:
    """Every how many lessons a d × d matrix is factored.

    That takes 2d³/3 operations, and a lesson some 10 d²: so an interval that grows as d makes the one a fixed share of
    the other. In small matrices it is the number of operations that counts, not their size.
    """
    return max(_SHORTEST, -(-d // 4))


def keep_definite(blocks: Sequence[Block], names: Sequence[str], step: int) -> None:
    """Make the named matrices in the layers' states definite where it is time for that.

    Lessons are counted by the step's number, which every process knows and every checkpoint has: as k // T. While T
    grows with k, as in a burn-in, that stands still, and none of these young matrices is looked at.

    Args:
        blocks: Layers that learn in this step.
        names: What they learn pair by pair.
        step: k, from 1.
    """
    for block in blocks:
        for H in (block.state[name] for name in names):
            if step // update_freq(block.group) % interval(H.shape[-1]) == 0:
                make_definite_(H)
