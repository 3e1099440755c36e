"""Tensors that one rank has and all need: one flat message from each rank that has some, and large ones as they lie."""

import torch
from torch import Tensor, distributed

from kfqn_ext.optim.passes.ranks.bucket import LARGE


class Letters:
    """Tensors with their senders, in the same order on all ranks of a group.

    Attributes:
        messages: How many were sent to this rank, or by it.
        bytes_sent: How much this rank sent.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Begin with none."""
        self._group, self._rank = group, distributed.get_rank(group)
        self._tensors: list[Tensor] = []
        self._flows: dict[tuple[int, torch.device, torch.dtype, int], list[int]] = {}
        self.bytes_sent, self.messages = 0, 0

    def add(self, tensor: Tensor, sender: int) -> None:
        """Take a tensor in; on other ranks than the sender's only its form, dtype and device count.

        A large one that is contiguous there is written to.
        """
        own_message = len(self._tensors) + 1 if tensor.numel() >= LARGE else 0
        self._flows.setdefault((sender, tensor.device, tensor.dtype, own_message), []).append(len(self._tensors))
        self._tensors.append(tensor)

    def delivered(self) -> list[Tensor]:
        """Send and receive; return all tensors in their order, as views of what was sent."""
        flats, waiting = [], []
        for (sender, _, _, own_message), numbers in self._flows.items():  # all are on their way at once
            given = [self._tensors[i] for i in numbers]
            flat = self._in_place(sender, given[0]) if own_message else self._flat(sender, given)
            source = in_world(sender, self._group)
            waiting.append(distributed.broadcast(flat, source, group=self._group, async_op=True))
            flats.append(flat)
            self.messages += 1
            self.bytes_sent += flat.numel() * flat.element_size() if sender == self._rank else 0
        found = list(self._tensors)
        for work, flat, numbers in zip(waiting, flats, self._flows.values(), strict=True):
            if work is not None:
                work.wait()
            parts = torch.split(flat.view(-1), [self._tensors[i].numel() for i in numbers])
            for i, part in zip(numbers, parts, strict=True):
                found[i] = part.view(self._tensors[i].shape)
        return found

    def _flat(self, sender: int, tensors: list[Tensor]) -> Tensor:
        if sender == self._rank:
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))

    def _in_place(self, sender: int, tensor: Tensor) -> Tensor:
        if sender == self._rank or tensor.is_contiguous():
            return tensor.contiguous()
        return tensor.new_empty(tensor.shape)


def in_world(rank: int, group: distributed.ProcessGroup | None) -> int:
    """What a rank of a group is called among all processes."""
    return rank if group is None else distributed.get_global_rank(group, rank)
