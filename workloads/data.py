"""Data held as tensors, and shuffled minibatches of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Data of one kind, training or validation.

    Attributes:
        x: Inputs, [n, ...]: floating point, or uint8 where 0 to 255 stands for 0 to 1.
        y: Class labels [n], or None where an input is its own target.
    """

    x: Tensor
    y: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    def to(self, device: torch.device) -> "Split":
        return Split(self.x.to(device), None if self.y is None else self.y.to(device))

    def first(self, n: int) -> "Split":
        return Split(self.x[:n], None if self.y is None else self.y[:n])

    def batch(self, index: Tensor | slice, transform: Callable[[Tensor], Tensor] | None = None) -> Batch:
        x = self.x[index]
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        x = x if transform is None else transform(x)
        return x, (x if self.y is None else self.y[index])

    def shuffled(
        self, order: Tensor, batch_size: int, transform: Callable[[Tensor], Tensor] | None = None, first: int = 0
    ) -> Iterator[Batch]:
        """One epoch in the given order, from its ``first`` minibatch on; the last incomplete one is left out."""
        for index in order.split(batch_size)[first:]:
            if len(index) == min(batch_size, len(self)):
                yield self.batch(index.to(self.x.device), transform)

    def in_order(self, batch_size: int, transform: Callable[[Tensor], Tensor] | None = None) -> "InOrder":
        return InOrder(self, batch_size, transform)


@dataclass(frozen=True)
class InOrder:
    """All data once, in order; can be iterated again."""

    split: Split
    batch_size: int
    transform: Callable[[Tensor], Tensor] | None

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.split), self.batch_size):
            yield self.split.batch(slice(start, start + self.batch_size), self.transform)


@dataclass(frozen=True)
class Data:
    """A data set."""

    train: Split
    valid: Split | None = None
