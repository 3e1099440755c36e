"""Did a backward pass run? Told by the gradients alone, without keeping them alive."""

import weakref
from collections.abc import Iterable

from torch import Tensor

from kfqn_ext._torch import rows_of


class GradientWatch:
    """Remembers which tensors hold the gradients of some parameters, and how often they were written to."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Take note of the gradients as they are."""
        self._parameters = list(parameters)
        self._before = [
            None if p.grad is None else (weakref.ref(p.grad), rows_of(p.grad)._version) for p in self._parameters
        ]

    @property
    def changed(self) -> bool:
        """Whether a gradient has appeared, vanished, been replaced or been written to since."""
        return not all(self._same(p.grad, seen) for p, seen in zip(self._parameters, self._before, strict=True))

    @staticmethod
    def _same(grad: Tensor | None, seen: tuple[weakref.ref[Tensor], int] | None) -> bool:
        if grad is None or seen is None:
            return grad is None and seen is None
        return seen[0]() is grad and seen[1] == rows_of(grad)._version
