"""Which process keeps the state of which layer, and how what follows from it reaches the others."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kfqn_ext._torch import rows_of
from kfqn_ext.optim.groups.plan import Layer
from kfqn_ext.optim.inverses import State
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.recipe import Recipe


class Mail(Protocol):
    """What carries tensors between processes.

    Attributes:
        rank: Which process this is.
        size: How many there are.
    """

    rank: int
    size: int

    def spread(self, tensors: Sequence[Tensor], senders: Sequence[int]) -> list[Tensor]:
        """Give every process each tensor as its sender has it; a collective. Of others, only form and dtype count."""

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number, or of a tensor, over processes; a collective."""

    def gathered(self, part: Any, receiver: int) -> list[Any] | None:
        """What each process has given, for one of them; None for the others. A collective."""


class RowMail(Protocol):
    """What brings together tensors of which each process has rows, and divides them again."""

    def gathered(
        self, rows: Sequence[Tensor], shapes: Sequence[torch.Size], owners: Sequence[int]
    ) -> list[Tensor | None]:
        """Each tensor whole, for its owner; None for the others. A collective."""

    def divided(self, whole: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor]:
        """The rows that this process is to have of each tensor, from its owner; a collective.

        Of tensors that others own, only form and dtype count.
        """


class Owners:
    """An owner for each layer with a Kronecker block: it alone keeps the layer's state, and learns.

    Everybody knows who has what without a word: the assignment follows from the plan and the recipe.

    Attributes:
        mail: What reaches the other processes.
        rows: Moves rows of parameters, where a process has rows alone, and an owner needs those of its layers whole;
            None where each has a copy of the model.
    """

    def __init__(self, recipe: Recipe, mail: Mail, rows: RowMail | None = None) -> None:
        """Divide the layers of a recipe among the processes that mail reaches."""
        self._recipe, self.mail, self.rows = recipe, mail, rows
        self._sizes: dict[Tensor, int] = {}
        self._ranks: dict[Tensor, int] = {}
        self._templates: dict[Hashable, State] = {}

    @property
    def several(self) -> bool:
        """Whether there is anybody to share with."""
        return self.mail.size > 1

    def assign(self, layers: Mapping[Tensor, Layer]) -> None:
        """Find an owner for each layer that has none: the largest state first, to the rank with least so far.

        Args:
            layers: All layers, by their weights.

        Raises:
            NotImplementedError: If an extension that curvature starts from does not say how large what it measures is.
        """
        if not self.several:
            return
        new = [weight for weight in layers if weight not in self._ranks]
        self._sizes |= {w: sum(t.numel() * t.element_size() for t in self.template(layers[w]).values()) for w in new}
        loads = self._loads(layers)
        found = assigned([self._sizes[weight] for weight in new], loads)
        self._ranks |= dict(zip(new, found, strict=True))

    def _loads(self, layers: Mapping[Tensor, Layer]) -> list[int]:
        loads = [0] * self.mail.size
        for weight, rank in self._ranks.items():
            loads[rank] += self._sizes[weight] if weight in layers else 0
        return loads

    def share(self, layers: Mapping[Tensor, Layer]) -> str:
        """Say how much of all layers' state is on the fullest rank; nothing where there is one."""
        loads = self._loads(layers)
        return f"{max(loads) / sum(loads):.1%} on the fullest of {len(loads)} processes" if self.several else ""

    def rank_of(self, layer: Layer) -> int:
        """Who keeps a layer's state."""
        return self._ranks[layer.weight] if self.several else self.mail.rank

    def owns(self, layer: Layer) -> bool:
        """Whether this process does."""
        return self.rank_of(layer) == self.mail.rank

    def template(self, layer: Layer) -> State:
        """The state that a layer will have, as tensors without numbers, on the device "meta"."""
        key = layer.weight, layer.weight.dtype, layer.geometry.matrix_shape
        if key not in self._templates:
            block = blocks.without_numbers(layer)
            blocks.start_empty(block, self._recipe)
            self._templates[key] = block.state
        return self._templates[key]

    def spread(self, of_layers: Sequence[tuple[Layer, Tensor]]) -> list[Tensor]:
        """Tensors of layers as their owners have them; a collective. Of others', give what is :func:`to_be_filled`."""
        return self.mail.spread([tensor for _, tensor in of_layers], [self.rank_of(layer) for layer, _ in of_layers])

    def spread_steps(self, of_layers: Sequence[tuple[Layer, Tensor]]) -> list[Tensor]:
        """The same for steps of parameters; where a process has rows of these alone, its rows of the steps."""
        if self.rows is None:
            return self.spread(of_layers)
        return self.rows.divided([step for _, step in of_layers], [self.rank_of(layer) for layer, _ in of_layers])

    def gradients(self, gradients: Mapping[Tensor, Tensor], layers: Sequence[Layer]) -> dict[Tensor, Tensor]:
        """The gradients that moves are found from: whole for a layer's owner, and what is here of all others.

        Where processes have rows of parameters alone, it is a collective.

        Args:
            gradients: Of parameters that have one, by parameter.
            layers: In an order that all processes have.
        """
        found = {p: rows_of(g) for p, g in gradients.items()}
        if self.rows is None:
            return found
        parts = [(p, self.rank_of(layer)) for layer in layers for p in (layer.weight, layer.bias) if p in found]
        sent = [found[p] for p, _ in parts], [p.shape for p, _ in parts], [rank for _, rank in parts]
        whole = zip(parts, self.rows.gathered(*sent), strict=True)
        return found | {p: g for (p, _), g in whole if g is not None}

    def norms(self, norms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Norms of whole tensors from those of what is here of each, []; a collective where that is rows."""
        if self.rows is None:
            return norms
        squares = self.mail.total(torch.stack(list(norms)).double().square())
        return squares.sqrt().to(norms[0].dtype).unbind()


def to_be_filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for a tensor that another process has: its form, without its memory."""
    return torch.empty((), dtype=dtype, device=device).expand(*shape)


def assigned(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Divide layers: the largest first, to the rank with least so far; of equals, to the first.

    Args:
        sizes: Of the layers' states.
        loads: What each rank has already.

    Returns:
        The rank of each layer.
    """
    loads, ranks = list(loads), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += sizes[i]
    return ranks
