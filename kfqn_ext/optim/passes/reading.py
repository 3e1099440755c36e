"""What the layers of a pass were given: enough to tell whether a second pass has the data of the first."""

import torch
from torch import Tensor, nn

from kfqn_ext.geometry import fraction_size, geometry_of

# A sum in another order is off by rounding; means over other data are off by far more.
_SAME = 1e-4
_TRUE = torch.ones((), dtype=torch.bool, device="cpu")


class Reading:
    """Notes of one pass.

    Only what the first layer reads can't depend on parameters that a step has moved: nothing else came before it. An
    input that needs a gradient may depend on some all the same, and without gradients that can't be seen. What an
    adversary has made of the data depends on layers that ran before.

    Attributes:
        called: Whether a layer was called at all.
        rows: Along dimension 0 of the layers' inputs, how many there were.
        mean: Mean of the first layer's input over its first data, shaped like one; None where nothing is known.
    """

    def __init__(self, fraction: float) -> None:
        """Take notes on a fraction of the data, the first ones."""
        self.called = False
        self.rows: set[int] = set()
        self.mean: Tensor | None = None
        self._fraction, self._size = fraction, 0

    def __call__(self, module: nn.Module, x: Tensor | None) -> None:
        """Take note of a call of a layer."""
        first, self.called = not self.called, True
        geometry = geometry_of(module)
        if geometry is None or x is None:
            return
        batch = geometry.as_batch(x)
        self.rows.add(len(batch))
        if first and len(batch) > 0 and torch.is_grad_enabled() and not x.requires_grad:
            part = batch[: fraction_size(len(batch), self._fraction)]
            self._size, self.mean = len(part), part.to(torch.promote_types(part.dtype, torch.float32)).mean(0)

    def agrees_with(self, other: "Reading") -> Tensor:
        """Whether both passes read the same data, bool [], for all that is known; numbers of data are not compared."""
        if self.mean is None or other.mean is None or self._size != other._size:
            return _TRUE
        if self.mean.shape != other.mean.shape:
            return ~_TRUE
        apart = (self.mean - other.mean).abs().amax()
        return ~(apart > _SAME * torch.maximum(self.mean.abs().amax(), other.mean.abs().amax()))
