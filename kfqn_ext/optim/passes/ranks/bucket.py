"""A sum over ranks of many small tensors as one message, and of large matrices where they lie."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

LARGE = 1 << 16  # numbers: to copy as many costs more than another message


class Bucket:
    """Tensors that are to be summed over the ranks of a group, in the same order on all of them."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Begin with none."""
        self._group = group
        self._tensors: list[Tensor] = []
        self.bytes_sent, self.messages = 0, 0

    def add(self, tensor: Tensor) -> int:
        """Take a tensor in, which may be overwritten; return under which number its sum will be found."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def sums(self) -> list[Tensor]:
        """Send, and return the sums."""
        sums = list(self._tensors)
        together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            if tensor.numel() >= LARGE and tensor.is_contiguous():
                self._all_reduce(tensor)
            else:
                together.setdefault((tensor.device, tensor.dtype), []).append(i)
        for numbers in together.values():
            flat = torch.cat([self._tensors[i].reshape(-1) for i in numbers])
            self._all_reduce(flat)
            parts = torch.split(flat, [self._tensors[i].numel() for i in numbers])
            for i, part in zip(numbers, parts, strict=True):
                sums[i] = part.view(self._tensors[i].shape)
        return sums

    def _all_reduce(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self._group)
        self.messages += 1
        self.bytes_sent += tensor.numel() * tensor.element_size()


def beside(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers of the host as a tensor of another's dtype, on its device, which the host does not wait for."""
    host = torch.tensor(numbers, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)
