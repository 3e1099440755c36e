"""H_A by BFGS along s = H_A ā with the exact action y = A s + λ_A s of a matrix that is known."""

from dataclasses import dataclass

from torch import Tensor

from kfqn_ext.linalg import bfgs_update_, damped_inverse
from kfqn_ext.optim.sides.base import Seen, State


def _times(H: Tensor, v: Tensor) -> Tensor:
    return (H @ v.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class HessianAction:
    """"Minibatched" Hessian-action BFGS, ``eq_1``: A is this minibatch's and is never formed."""

    needs_gram = False

    def start(self, state: State, A: Tensor, damping: float) -> None:  # noqa: D102
        state["H_A"] = damped_inverse(A, damping)

    def probe(self, state: State, a_bar: Tensor) -> Tensor | None:  # noqa: D102
        # None in the very pass that measures A for the first H_A.
        return _times(state["H_A"], a_bar) if "H_A" in state else None

    def learn(self, state: State, seen: Seen, damping: float) -> Tensor:  # noqa: D102
        s, A_s = seen.first.s, seen.first.A_s
        if s is None or A_s is None:
            assert seen.A is not None  # the pass that made the first H_A has formed A
            s = _times(state["H_A"], seen.first.a_bar)
            A_s = _times(seen.A, s)
        return bfgs_update_(state["H_A"], s, A_s + damping * s)

    def precondition(self, state: State, M: Tensor) -> Tensor:  # noqa: D102
        return M @ state["H_A"]
