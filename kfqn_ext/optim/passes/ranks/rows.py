"""Tensors of which each rank has rows, and one rank needs the whole: one message there for many, and one back."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from kfqn_ext._torch import row_counts


class Rows:
    """Gathers and divides tensors along their first dimension, as FSDP2 divides parameters.

    Attributes:
        messages: How many collectives there were.
        bytes_sent: How much this rank gave to others.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Between the ranks of a group; None for all."""
        self._group = group
        self._rank, self._size = distributed.get_rank(group), distributed.get_world_size(group)
        self.messages = self.bytes_sent = 0

    def gathered(
        self, rows: Sequence[Tensor], shapes: Sequence[torch.Size], owners: Sequence[int]
    ) -> list[Tensor | None]:
        """Each tensor whole, for its owner; None for the others. A collective.

        Args:
            rows: This rank's of each tensor.
            shapes: Of the whole tensors.
            owners: Who is to have each.
        """
        whole: list[Tensor | None] = [None] * len(rows)
        for numbers in _akin(rows):
            sent = [[rows[i] for i in numbers if owners[i] == rank] for rank in range(self._size)]
            own = [i for i in numbers if owners[i] == self._rank]
            forms = [[self._form(shapes[i], rank) for i in own] for rank in range(self._size)]
            for i, *parts in zip(own, *self._exchanged(sent, forms, rows[numbers[0]]), strict=True):
                whole[i] = torch.cat(parts)
        return whole

    def divided(self, whole: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor]:
        """This rank's rows of each tensor, as its owner has it; of others', only form and dtype count. A collective."""
        rows: list[Tensor | None] = [None] * len(whole)
        for numbers in _akin(whole):
            own = [whole[i] for i in numbers if owners[i] == self._rank]
            parts = [torch.split(t, row_counts(len(t), self._size)) for t in own]
            sent = [[of_one[rank] for of_one in parts] for rank in range(self._size)]
            of_rank = [[i for i in numbers if owners[i] == rank] for rank in range(self._size)]
            forms = [[self._form(whole[i].shape, self._rank) for i in found] for found in of_rank]
            received = self._exchanged(sent, forms, whole[numbers[0]])
            for found, arrived in zip(of_rank, received, strict=True):
                for i, part in zip(found, arrived, strict=True):
                    rows[i] = part
        return [part for part in rows if part is not None]

    def _form(self, shape: torch.Size, rank: int) -> torch.Size:
        """That of a rank's rows."""
        return torch.Size([row_counts(shape[0], self._size)[rank], *shape[1:]])

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], forms: Sequence[Sequence[torch.Size]], like: Tensor
    ) -> list[list[Tensor]]:
        """What each rank has sent to this one, in the forms that it has, for what this one sends to each."""
        flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for tensors in sent for t in tensors)])
        given = [sum(t.numel() for t in tensors) for tensors in sent]
        taken = [sum(form.numel() for form in of_rank) for of_rank in forms]
        received = like.new_empty(sum(taken))
        distributed.all_to_all_single(received, flat, taken, given, group=self._group)
        self.messages += 1
        self.bytes_sent += (len(flat) - given[self._rank]) * flat.element_size()
        parts = iter(torch.split(received, [form.numel() for of_rank in forms for form in of_rank]))
        return [[next(parts).view(form) for form in of_rank] for of_rank in forms]


def _akin(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors that travel together: of one device and dtype."""
    akin: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        akin.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(akin.values())
