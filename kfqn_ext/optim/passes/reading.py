"""What the layers of a pass were given: enough to tell whether a second pass has the data of the first."""

import torch
from torch import Tensor, nn

from kfqn_ext.geometry import fraction_size, geometry_of

# A sum in another order is off by rounding; means over other data are off by far more.
_SAME = 1e-4
_CALLS = 8  # so many inputs of a layer tell enough
_TRUE = torch.ones((), dtype=torch.bool, device="cpu")


class Reading:
    """Notes of one pass.

    Only what the first layer reads can't depend on parameters that a step has moved: nothing else came before it. An
    input that needs a gradient may depend on some all the same, and without gradients that can't be seen. What an
    adversary has made of the data depends on layers that ran before.

    Attributes:
        called: Whether a layer was called at all.
        rows: Along dimension 0 of the layers' inputs, how many there were.
    """

    def __init__(self, fraction: float) -> None:
        """Take notes on a fraction of the data, the first ones."""
        self.called = False
        self.rows: set[int] = set()
        self._fraction = fraction
        self._first: nn.Module | None = None  # the layer that was called first, where its inputs tell
        self._means: list[Tensor] = []  # of its inputs over their first data, each shaped like one and flat
        self._shapes: set[torch.Size] = set()

    def __call__(self, module: nn.Module, x: Tensor | None) -> None:
        """Take note of a call of a layer."""
        first, self.called = not self.called, True
        geometry = geometry_of(module)
        if geometry is None or x is None:
            return
        batch = geometry.as_batch(x)
        self.rows.add(len(batch))
        tells = len(batch) > 0 and torch.is_grad_enabled() and not x.requires_grad
        if first and tells:
            self._first = module
        if module is self._first and tells and len(self._means) < _CALLS:
            part = batch.detach()[: fraction_size(len(batch), self._fraction)]
            self._shapes.add(part.shape)
            self._means.append(part.to(torch.promote_types(part.dtype, torch.float32)).mean(0).flatten())

    def agrees_with(self, other: "Reading") -> Tensor:
        """Whether some of the data is the same in both passes, bool [], or nothing tells; counts are not compared.

        One of the passes may have had calls beside those that count, as for a log.
        """
        if self._first is None or self._first is not other._first or len(self._shapes | other._shapes) > 1:
            return _TRUE
        one, two = (torch.stack(reading._means) for reading in (self, other))
        apart = (one[:, None] - two).abs().amax(-1)
        return ~(apart > _SAME * torch.maximum(one.abs().amax(), two.abs().amax())).all()
