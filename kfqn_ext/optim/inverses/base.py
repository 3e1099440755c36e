"""What an optimizer asks of the two inverses of a layer's block, and what it shows them.

An inverse is a rule without state of its own: what it learns is in the layer's state, a dictionary of tensors.
Dampings come as tensors [*B]. L layers of one device, dtype and *B learn together, as each operation on vectors is then
one for all of them: their vectors come stacked, [L, *B, d], padded with zeros to the longest
(:mod:`kfqn_ext.linalg.padded`).

A rule names the extensions whose quantities it learns from, by class: any subclass of
:class:`~kfqn_ext.extensions.LayerExtension` can be named, and nothing else has to know of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.extensions import InputGram, KFACFactors, LayerExtension
from kfqn_ext.linalg import few_columns
from kfqn_ext.linalg.padded import stack, unstack

Q = TypeVar("Q")
State = dict[str, Tensor]
"""What an optimizer keeps of a layer, by name."""
Direction = tuple[Tensor, Tensor | None]
"""(s, kept): in what directions a factor is looked at, and what ``learn`` is to find beside its product with s."""
Kind = type[LayerExtension[Any]]
Kinds = tuple[Kind, ...]


class Measured:
    """What was measured of one layer in one pass: a quantity for each class of extensions."""

    def __init__(self, quantities: Mapping[Kind, Any] | None = None) -> None:
        """Hold quantities.

        Args:
            quantities: Each by the extension that gave it.
        """
        self._quantities = dict(quantities or {})

    def get(self, kind: type[LayerExtension[Q]]) -> Q | None:
        """The quantity of an extension, or of one that extends it; None where nothing measured it."""
        return next((q for made_by, q in self._quantities.items() if issubclass(made_by, kind)), None)

    def __getitem__(self, kind: type[LayerExtension[Q]]) -> Q:
        """The quantity of an extension.

        Raises:
            MissingQuantitiesError: If it was not measured: no rule has named it.
        """
        quantity = self.get(kind)
        if quantity is None:
            raise MissingQuantitiesError(
                f"{kind.__name__} was not measured in this pass: name it in `first`, `second` or `starts_from` of the "
                "rule that reads it."
            )
        return quantity

    def has(self, kinds: Iterable[Kind]) -> bool:
        """Whether all of these were measured."""
        return all(self.get(kind) is not None for kind in kinds)

    def keep(self, kinds: Iterable[Kind]) -> None:
        """Let go all that none of these gives."""
        known, kinds = self._quantities, tuple(kinds)
        self._quantities = {made_by: q for made_by, q in known.items() if issubclass(made_by, kinds)}

    def __iter__(self) -> Any:
        """All quantities."""
        return iter(self._quantities.values())

    def items(self) -> Any:
        """All quantities, each after the extension that gave it."""
        return self._quantities.items()

    @property
    def A(self) -> Tensor | None:
        """This minibatch's A, [*B, d_in, d_in], where it was formed; None elsewhere."""
        gram, factors = self.get(InputGram), self.get(KFACFactors)
        return gram.A if gram is not None else None if factors is None else factors.Omega

    @property
    def num_locations(self) -> float | None:
        """|T|; None where nothing was measured."""
        return next((q.num_locations for q in self), None)


@dataclass(frozen=True)
class Seen:
    """What was measured of several layers in the two passes over a minibatch.

    Attributes:
        first: In the first pass, of one layer each.
        second: In the second pass.
        finite: Whether all gradients of the minibatch were finite, bool []; nothing is learned from others.
        step: k of the step that the minibatch is of, from 1.
    """

    first: Sequence[Measured]
    second: Sequence[Measured]
    finite: Tensor
    step: int


class Inverse:
    """What H_A's and H_G's rules have in common; by default there is nothing to measure and nothing to recompute."""

    first: ClassVar[Kinds] = ()
    """Extensions whose quantities ``learn`` needs from the first pass."""
    second: ClassVar[Kinds] = ()
    """Extensions whose quantities ``learn`` needs from the second pass."""
    starts_from: ClassVar[Kinds] = ()
    """Extensions whose quantities ``start`` needs: from the first pass, or from a warm start's; from a second pass on
    sampled targets where ``second`` names one of them too. ``learn`` is shown those that it names itself."""
    recomputed: ClassVar[tuple[str, ...]] = ()
    """What ``update_inverse`` makes anew in a state. Of several processes one does it then, and sends these."""
    learned: ClassVar[tuple[str, ...]] = ()
    """Matrices in a state that ``learn`` updates by BFGS: now and then it is looked whether they are still definite."""

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:
        """Make the initial inverse in a layer's state; what was measured may be kept.

        Args:
            state: The layer's state.
            like: [*B, d], for shape, dtype and device.
            measured: Quantities of ``starts_from``.
            damping: λ_A or λ_G, [*B].
        """
        raise NotImplementedError

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        """Learn from both passes over a minibatch when k is a multiple of T; L layers, their dampings [L, *B]."""
        raise NotImplementedError

    def update_inverse(self, state: State, damping: Tensor) -> None:
        """Recompute what is not updated with every pair, when k is a multiple of T₂; one layer, its damping [*B]."""

    def trace(self, state: State) -> Tensor | None:
        """Mean eigenvalue of the factor, [*B]; None where the rule keeps no factor."""
        return None


class InputInverse(Inverse):
    """H_A, an approximate inverse of A + λ_A I."""

    starts_from: ClassVar[Kinds] = (InputGram,)

    def probe(self, state: State, a_bar: Tensor, step: int) -> Direction | None:
        """Choose directions s, [*B, d_in] or [*B, d_in, k], for which A s is wanted from the first pass; None for none.

        Args:
            state: The layer's state.
            a_bar: ā, [*B, d_in].
            step: k, from 1.

        Returns:
            s, and what ``learn`` is to find beside A s.
        """
        return None

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """M H_A: [*B, k, d_in] → the same, in the dtype of what the state holds."""
        return M.to(state["H_A"].dtype) @ state["H_A"]


class OutputInverse(Inverse):
    """H_G, an approximate inverse of G + λ_G I."""

    fisher: ClassVar[bool] = False
    """Whether it inverts the Fisher factor Γ in place of G."""
    in_own_units: ClassVar[bool] = False
    """Whether its factor counts in units of its mean eigenvalue, which is then one for a split of the damping."""

    @property
    def num_directions(self) -> int:
        """How many directions :meth:`probe` chooses: processes that lack the state for it are to know."""
        return 0

    def probe(self, state: State, v: Tensor, step: int) -> tuple[Tensor, Tensor] | None:
        """Choose directions s, [*B, d_out, k], for which Γ s is wanted from the first pass; None for none.

        Args:
            state: The layer's state.
            v: M H_A u, [*B, d_out], with u the direction of inputs in which the last step was longest, about. H_G v is
                then the direction of outputs in which it was.
            step: k, from 1.

        Returns:
            s, and what ``learn`` is to find beside Γ s.
        """
        return None

    def where_shifts_are_removed(self) -> "OutputInverse | None":
        """What this rule comes to, at less cost, where ∂h̄ = 0; None where it learns from more than ∂h̄."""
        return None

    def precondition(self, state: State, M: Tensor) -> Tensor:
        """H_G M: [*B, d_out, k] → the same, in the dtype of what the state holds."""
        return state["H_G"] @ M.to(state["H_G"].dtype)


def read(states: Sequence[State], key: str) -> Tensor:
    """A vector of each state, stacked: [L, *B, d]."""
    return stack(state[key] for state in states)


def write(states: Sequence[State], key: str, value: Tensor) -> None:
    """Write stacked vectors back into each state, in place."""
    vectors = [state[key] for state in states]
    torch._foreach_copy_(vectors, unstack(value, [v.shape[-1] for v in vectors]))


def pairs_first(directions: Tensor) -> Tensor:
    """Stacked directions, [L, *B, d, k], as k vectors for each layer: [k, L, *B, d]."""
    return directions.movedim(-1, 0).contiguous()


def count(states: Sequence[State], key: str, *events: Tensor) -> None:
    """Add how often each of [L, *B] had each event to each state's counter under ``key``: int64 [len(events), *B]."""
    happened = torch.stack(events, dim=1).to(torch.int64)
    torch._foreach_add_([state[key] for state in states], happened.unbind())


def start_count(state: State, key: str, like: Tensor) -> None:
    """Set the three counters of pairs (kept, damped, skipped) to zero; ``like`` has the shape [*B]."""
    state[key] = torch.zeros(3, *like.shape, dtype=torch.int64, device=like.device)


def check_num_random(number: object) -> None:
    """Raise a ValueError where it is no number of directions."""
    if type(number) is not int or number < 0:
        raise ValueError(
            f"Invalid num_random: {number!r}. It must be an integer of at least 0: how many directions are random."
        )


def unit_columns(V: Tensor) -> Tensor:
    """V with columns of length one, [*B, d, k]; those of zeros stay."""
    norms: Tensor = torch.linalg.vector_norm(V, dim=-2, keepdim=True)
    return V / norms.clamp(min=torch.finfo(V.dtype).tiny)


def random_columns(M: Tensor, number: int, step: int) -> Tensor:
    """So many random combinations of M's columns, [*B, d, number]; they depend on the step's number alone."""
    generator = None if M.is_meta else torch.Generator(M.device).manual_seed(step)
    shape = (*M.shape[:-2], M.shape[-1], number)
    # In float32 whatever M is: a generator has other numbers for each dtype.
    columns = torch.randn(shape, generator=generator, dtype=torch.float32, device=M.device).to(M.dtype)
    return few_columns.product(M, columns)
