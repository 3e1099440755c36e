"""What all extensions of this package share: measure every supported layer, merge calls, keep results by module."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from backpack.extensions.backprop_extension import FAIL_SILENT
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn

from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.geometry import LayerPass, geometry_of

Q = TypeVar("Q")


class LayerExtension(FirstOrderBackpropExtension, Generic[Q]):  # type: ignore[misc]  # BackPACK has no types
    """A BackPACK extension that maps what a layer saw in a pass to one quantity.

    Results belong to the extension: ``ext[module]``. They are also set on the layer's weight, as BackPACK does,
    under ``savefield``. A backward pass overwrites what an earlier one left; calls of one layer within a pass are
    merged, as if their inputs were one batch. Layers that can't be measured are passed over; so are layers whose
    weight needs no gradient, unless ``modules`` names them.
    """

    mirrored = True
    """Whether results are set on the weights; turned off where nobody is to keep them alive."""

    def __init__(
        self,
        savefield: str,
        reduction: str = "mean",
        subsampling: list[int] | None = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up an extension.

        Args:
            savefield: Attribute of the weight that mirrors the result.
            reduction: "mean" or "sum": what the loss does over the data of a batch. The gradient that reaches a
                layer carries no trace of it, and quantities are per datum.
            subsampling: Indices of the data of each batch to measure; all where None.
            accumulate: Merge over backward passes (micro-batches) too, until :meth:`clear`.
            modules: Measure these layers only, whether or not their weight needs a gradient.

        Raises:
            ValueError: If ``reduction`` is neither "mean" nor "sum".
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction={reduction!r}: say what the loss does over the data of a batch, 'mean' or 'sum'."
            )
        super().__init__(savefield, module_exts={}, fail_mode=FAIL_SILENT, subsampling=subsampling)
        self.reduction = reduction
        self.accumulate = accumulate
        self._only = None if modules is None else WeakSet(modules)
        self.saw_empty_batch = False
        self._results: WeakKeyDictionary[nn.Module, tuple[int, Q]] = WeakKeyDictionary()

    @abstractmethod
    def measure(self, module: nn.Module, layer: LayerPass) -> Q:
        """Compute the quantity from one call of a layer."""

    @abstractmethod
    def merge(self, module: nn.Module, old: Q, layer: LayerPass) -> Q:
        """Extend a quantity by another call of the same layer: the result of one call on both batches."""

    def __call__(self, module: nn.Module, g_inp: tuple[Any, ...], g_out: tuple[Tensor, ...]) -> None:
        """Measure one layer; BackPACK calls this in the backward pass."""
        geometry = geometry_of(module)
        if geometry is None:
            return
        weight: Any = module.weight
        if module not in self._only if self._only is not None else not weight.requires_grad:
            return
        x: Any = module.input0
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            layer = LayerPass.of(geometry, module, x, g_out[0], self.reduction, self._subsampling)
            if layer.num_data == 0:  # as in a mixture of experts; there is nothing to average
                self.saw_empty_batch = True
                return
            backward = torch._C._current_graph_task_id()
            last, old = self._results.get(module, (None, None))
            if old is not None and (self.accumulate or last == backward):
                result = self.merge(module, old, layer)
            else:
                result = self.measure(module, layer)
        self._results[module] = (backward, result)
        if self.mirrored:
            setattr(weight, self.savefield, result)

    def clear(self) -> None:
        """Forget all results."""
        self._results.clear()

    def get(self, module: nn.Module) -> Q | None:
        """Look up the result of a layer; None where there is none."""
        return self._results[module][1] if module in self._results else None

    def __len__(self) -> int:
        """Count the layers that were measured."""
        return len(self._results)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a backward pass has measured this layer."""
        return module in self._results

    def __getitem__(self, module: nn.Module) -> Q:
        """Look up the result of a layer.

        Raises:
            MissingQuantitiesError: If no backward pass under this extension reached it.
        """
        try:
            return self._results[module][1]
        except KeyError:
            raise MissingQuantitiesError(
                f"{type(self).__name__} has no result for {module}. A result needs an extended model "
                "(kfqn_ext.extend) and a backward pass that reaches the layer inside `with backpack(ext):`; "
                "layers whose weight needs no gradient are passed over."
            ) from None
