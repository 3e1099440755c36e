"""What all extensions of this package share: measure every supported layer, merge calls, keep results by module."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from backpack.extensions.backprop_extension import FAIL_SILENT
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn

from kfqn_ext._torch import computes_gradient_of, is_on_host, rows_of, version_of
from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.extensions.calls import SingleCalls, call_of, is_added_up, objection_to, shared
from kfqn_ext.extensions.pooling import pooled, shares
from kfqn_ext.geometry import LayerGeometry, LayerPass, Subsampling, checked_subsampling, geometry_of, refusal
from kfqn_ext.geometry.layer_pass import joined
from kfqn_ext.linalg import full_precision

Q = TypeVar("Q")
# Of one layer, that may wait (2 MiB in float32): the more a call has, the less does it matter to measure it alone.
_FEW_NUMBERS = 2**19
_CHANGED = (
    "a hook has changed the gradient that entered it in place, before its calls were measured; let the hook return a "
    "new tensor"
)


@dataclass(frozen=True)
class _Waiting:
    """A call that is measured later, and how often its gradient had been written to."""

    layer: LayerPass
    version: int


@dataclass(frozen=True)
class _Entry(Generic[Q]):
    """A result, the last backward pass that it is of, the calls in it, and whether one pass had several of them.

    ``waiting`` are calls that are not yet in the result; None is one of no call. ``grad`` is ``weight.grad`` as that
    pass has found it, and how often it had been written to.
    """

    backward: int
    result: Q | None
    waiting: tuple[_Waiting, ...]
    calls: tuple[weakref.ref[Any], ...]
    several: bool
    grad: tuple[weakref.ref[Tensor], int] | None


class LayerExtension(FirstOrderBackpropExtension, Generic[Q]):  # type: ignore[misc]  # BackPACK has no types
    """A BackPACK extension that maps what a layer saw in a pass to one quantity.

    A class of its own needs ``savefield``, ``measure``, and a dataclass of results whose fields say how they are pooled
    (:mod:`kfqn_ext.extensions.pooling`).

    Results belong to the extension: ``ext[module]``. They are also set on the layer's weight, as BackPACK does,
    under ``savefield``. A backward pass overwrites what an earlier one left; calls of one layer within a pass are
    merged, as if their inputs were one batch. Layers that can't be measured are passed over; so are layers whose
    weight needs no gradient, unless ``modules`` names them. A layer that was called with other weights than it holds
    has no result in that pass.
    """

    savefield: ClassVar[str]
    """Attribute of the weight that mirrors the result."""
    mirrored = True
    """Whether results are set on the weights; turned off where nobody is to keep them alive."""
    loss_scale: float | None = None
    """What the loss was multiplied with before its backward pass (``GradScaler.get_scale()``); None for nothing."""
    of_grad = False
    """Whether passes count only where they add to ``weight.grad``, or would if it were not frozen for them: what
    ``autograd.grad`` returns is no step's."""
    follows_grad = False
    """Whether results belong to ``weight.grad``, and are forgotten where that was cleared since: set to None, or set to
    zero in place before the next pass."""
    in_part: ClassVar[bool] = False
    """Whether what it measures is compared between two passes, or is cheap to take from a part. It is then measured on
    the part of a minibatch that both passes run."""

    def __init__(
        self,
        reduction: str = "mean",
        subsampling: Subsampling = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up an extension.

        Args:
            reduction: "mean" or "sum": what the loss does over the data of a batch. The gradient that reaches a
                layer carries no trace of it, and quantities are per datum.
            subsampling: Which data of each batch to measure: indices, a fraction in (0.0, 1.0] (its first data, rounded
                up), or None for all.
            accumulate: Merge over backward passes (micro-batches) too, until :meth:`clear`. What is read in between
                is not to be used after the next pass: large matrices are updated in place.
            modules: Measure these layers only, whether or not their weight needs a gradient.

        Raises:
            ValueError: If ``reduction`` is neither "mean" nor "sum", or ``subsampling`` none of the above.
        """
        shares(reduction)  # raises on a wrong one
        super().__init__(
            self.savefield, module_exts={}, fail_mode=FAIL_SILENT, subsampling=checked_subsampling(subsampling)
        )
        self.reduction = reduction
        self.accumulate = accumulate
        self.has_gradient: Callable[[nn.Module], bool] = lambda module: cast(Tensor, module.weight).grad is not None
        """Whether a layer's weight has a gradient; its module may hold another than the one that is kept."""
        self.waits: Callable[[nn.Module], bool] = lambda module: False
        """Whether small calls of a layer wait for each other, to be measured as one batch."""
        self._only = None if modules is None else WeakSet(modules)
        self.saw_empty_batch = False
        self.saw_half = False
        self._results: WeakKeyDictionary[nn.Module, _Entry[Q]] = WeakKeyDictionary()
        self._objections: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()  # in which pass, and why

    @abstractmethod
    def measure(self, module: nn.Module, layer: LayerPass) -> Q:
        """Compute the quantity from one call of a layer."""

    def measure_more(self, module: nn.Module, old: Q, layer: LayerPass) -> Q:
        """Compute the quantity from another call of a layer, to be merged with what earlier calls gave."""
        return self.measure(module, layer)

    def merge(self, module: nn.Module, old: Q, layer: LayerPass) -> Q:
        """Extend a quantity by another call of the same layer: the result of one call on both batches.

        Raises:
            TypeError: If a field of the quantity does not say how it is pooled (:mod:`kfqn_ext.extensions.pooling`).
        """
        return pooled((old, self.measure_more(module, old, layer)), self.reduction)

    def add_gradient(self, module: nn.Module, old: Q, layer: LayerPass) -> Q:
        """Extend a quantity by another backward pass through a call that it has: of the next of several losses.

        Raises:
            NotImplementedError: Where the quantity of a sum of losses does not follow from those of its terms.
        """
        raise NotImplementedError(
            f"{type(self).__name__} met a second backward pass through one call of {module}. It holds squares of "
            "gradients, and those of a sum of losses do not follow from those of its terms: add the losses up and "
            "call backward() once."
        )

    def _add_gradient(self, module: nn.Module, old: Q, layer: LayerPass) -> Q:
        try:
            with torch.no_grad(), full_precision():
                return self.add_gradient(module, old, layer)
        except NotImplementedError:
            if not self.follows_grad:
                raise
            return old  # of the first loss alone: nobody has asked for it, and somebody's backward pass is to go on

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> Q:
        """A quantity of the right shapes without meaning, for a checkpoint that is read into empty state.

        Args:
            geometry: The layer.
            like: A tensor of the layer's working dtype and device.

        Raises:
            NotImplementedError: Where the extension has none.
        """
        raise NotImplementedError(
            f"{cls.__name__} can't make empty state, into which torch.distributed.checkpoint reads: give it a class "
            "method blank(geometry, like) that returns a quantity of zeros."
        )

    def absent(self, module: nn.Module) -> Q:
        """A quantity of no data, for a process that saw none of a layer of which others have seen some."""
        weight = rows_of(cast(Tensor, module.weight).detach())
        like = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        blank: Any = self.blank(cast(LayerGeometry, geometry_of(module)), like)
        return cast(Q, replace(blank, num_data=0))

    def wanted(self, module: nn.Module) -> LayerGeometry | None:
        """The layer that a module is, where the backward pass that runs is one in which it is to be measured."""
        return shared(module, ("wanted", id(self)), lambda: self._wanted(module))

    def _wanted(self, module: nn.Module) -> LayerGeometry | None:
        if self._only is not None and module not in self._only:
            return None
        geometry = shared(module, "geometry", lambda: geometry_of(module))
        if geometry is None:
            return None
        weight = cast(Tensor, module.weight)
        if self.of_grad:
            return geometry if is_added_up(module) else None
        named = self._only is not None
        return geometry if (named or weight.requires_grad) and computes_gradient_of(weight) else None

    def __call__(self, module: nn.Module, g_inp: tuple[Any, ...], g_out: tuple[Tensor, ...]) -> None:
        """Measure one layer; BackPACK calls this in the backward pass."""
        geometry = self.wanted(module)
        if geometry is None or self._objects(module):
            return
        self.saw_half |= g_out[0].dtype == torch.float16
        self._take(module, self._layer_pass(module, geometry, g_out[0]))

    def _layer_pass(self, module: nn.Module, geometry: LayerGeometry, g: Tensor) -> LayerPass:
        part, scale = self._subsampling, self.loss_scale or 1.0
        key = self.reduction, tuple(part) if isinstance(part, list) else part, scale
        x = cast(Tensor, module.input0)
        return shared(module, key, lambda: LayerPass.of(geometry, module, x, g, self.reduction, part, scale))

    def _objects(self, module: nn.Module) -> bool:
        """Whether this call is to be passed over, or another has ruled out that the pass is measured of the layer."""
        backward, (why, trained) = call_of(module)[1], objection_to(module, self.of_grad)
        if why is not None and cast(Tensor, module.weight).requires_grad and not trained:
            return True  # with weights that are held fixed, as a teacher's: no part of the layer's gradient
        if why is not None:
            if module in self._results:
                self._forget(module)
            self._objections[module] = backward, why
        elif module in self._objections and self._objections[module][0] != backward and self._is_past(module):
            del self._objections[module]
        return module in self._objections

    def _take(self, module: nn.Module, layer: LayerPass) -> None:
        """Make, or extend, the result of a layer."""
        call, backward = call_of(module)
        old = self._results.get(module)
        if old is not None and old.backward != backward and self._is_past(module):
            old = None
            self._forget(module)
        if layer.num_data == 0 or layer.num_locations == 0:  # as in a mixture of experts; nothing to average
            self.saw_empty_batch = True
            return
        calls = () if old is None else tuple(seen for seen in old.calls if seen() is not None)
        repeated = any(seen() is call for seen in calls)
        grown = self._grown(module, old, layer, repeated)
        if grown is None:
            return
        several = old is not None and (old.several or (not repeated and old.backward == backward))
        calls = calls if repeated else (*calls, weakref.ref(call))
        grad = cast(Tensor, module.weight).grad
        seen = None if grad is None else (weakref.ref(grad), version_of(rows_of(grad)))
        self._keep(module, _Entry(backward, *grown, calls, several, seen))

    def _grown(
        self, module: nn.Module, old: _Entry[Q] | None, layer: LayerPass, repeated: bool
    ) -> tuple[Q | None, tuple[_Waiting, ...]] | None:
        """Result and waiting calls, with one more; None where calls that have waited can't be measured any more."""
        result, waiting = (None, ()) if old is None else (old.result, old.waiting)
        if not repeated and self.waits(module) and _numbers([*_layers(waiting), layer]) <= _FEW_NUMBERS:
            return result, (*waiting, shared(module, ("kept", id(layer)), lambda: _kept(layer, waiting)))
        if waiting:
            result = self._settle(module)
            if result is None:
                return None
        if repeated:
            return self._add_gradient(module, cast(Q, result), layer), ()
        return self._with(module, result, [layer]), ()

    def _keep(self, module: nn.Module, entry: _Entry[Q]) -> None:
        self._results[module] = entry
        if self.mirrored and entry.result is not None:
            setattr(module.weight, self.savefield, entry.result)

    def _with(self, module: nn.Module, result: Q | None, calls: Sequence[LayerPass]) -> Q:
        """A result with more calls in it."""
        with torch.no_grad(), full_precision():
            for layer in joined(calls, self.reduction):
                result = self.measure(module, layer) if result is None else self.merge(module, result, layer)
        return cast(Q, result)

    def _settle(self, module: nn.Module) -> Q | None:
        """The result of a layer, after the calls that wait; None where these can't be measured any more."""
        entry = self._results[module]
        if any(version_of(call.layer.g) != call.version for call in entry.waiting):
            self._forget(module)
            self._objections[module] = entry.backward, _CHANGED
            return None
        if entry.waiting:
            entry = replace(entry, result=self._with(module, entry.result, _layers(entry.waiting)), waiting=())
            self._keep(module, entry)
        return entry.result

    def _is_past(self, module: nn.Module) -> bool:
        """Whether what an earlier backward pass has left is no part of what comes."""
        return not self.accumulate or self._is_cleared(module) or self._is_zeroed(module)

    def _is_cleared(self, module: nn.Module) -> bool:
        return self.follows_grad and not self.has_gradient(module)

    def _is_zeroed(self, module: nn.Module) -> bool:
        """Whether ``weight.grad`` was set to zero; waits for the device where it was written to at all.

        A tensor of zeros that took its place is noticed on the host, where to look at it needs no waiting.
        """
        grad = cast(Tensor, module.weight).grad
        if not self.follows_grad or grad is None:
            return False
        seen = self._results[module].grad if module in self._results else None
        rows, is_new = rows_of(grad), seen is None or seen[0]() is not grad
        as_left = 0 if seen is None or is_new else seen[1] + 1  # by the pass, which has added to it
        may_be_zero = version_of(rows) != as_left or (is_new and is_on_host(rows))
        return may_be_zero and not bool(rows.any())

    def _forget(self, module: nn.Module) -> None:
        result, weight = self._results.pop(module).result, module._parameters.get("weight")
        if weight is not None and result is not None and weight.__dict__.get(self.savefield) is result:
            delattr(weight, self.savefield)

    def finish(self, single: SingleCalls | None = None) -> None:
        """Measure the calls that wait: no other is to come.

        Args:
            single: Learns which layers were called once in a pass.
        """
        for module, entry in list(self._results.items()):
            if single is not None:
                single.note(module, entry.several)
            self._settle(module)

    def forget_cleared(self) -> None:
        """Where results belong to ``weight.grad``, forget those for which that was set to None since."""
        for module in [module for module in self._results if self._is_cleared(module)]:
            self._forget(module)

    def clear(self) -> None:
        """Forget all results, and take them off the weights."""
        for module in list(self._results):
            self._forget(module)
        self._objections.clear()

    def get(self, module: nn.Module) -> Q | None:
        """Look up the result of a layer; None where there is none."""
        return self._settle(module) if module in self._results else None

    def values(self) -> list[Q]:
        """List all results."""
        return [result for _, result in self.items()]

    def items(self) -> list[tuple[nn.Module, Q]]:
        """List all results, each after its layer."""
        settled = [(module, self._settle(module)) for module in list(self._results)]
        return [(module, result) for module, result in settled if result is not None]

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
        result = self.get(module)
        if result is None:
            raise MissingQuantitiesError(f"{type(self).__name__} has no result for {module}{self._reason(module)}")
        return result

    def _reason(self, module: nn.Module) -> str:
        """Why there is no result."""
        why = refusal(module)
        if why is not None:
            return f": {why}."
        if self._only is not None and module not in self._only:
            return ": it is not among `modules`."
        if module in self._objections:
            return f": {self._objections[module][1]}."
        empty = " A batch that some layer saw was empty: there is nothing to average." if self.saw_empty_batch else ""
        return (
            f".{empty} A result needs an extended model (kfqn_ext.extend) and a backward pass that reaches the layer "
            "inside `with backpack(ext):`, for a frozen weight the forward pass as well (input_gradients_only reaches "
            "a layer below which nothing is trained). Layers whose weight needs no gradient are passed over unless "
            "`modules` names them, and so are passes that do not compute it, as autograd.grad(loss, x) or those of "
            "weights of another's under torch.func.functional_call, and those with create_graph=True."
        )


def _layers(waiting: Sequence[_Waiting]) -> list[LayerPass]:
    return [call.layer for call in waiting]


def _numbers(calls: Sequence[LayerPass]) -> int:
    """How many numbers calls of a layer hold, its weight counted once."""
    return calls[0].weight.numel() + sum(call.x.numel() + call.g.numel() for call in calls)


def _kept(layer: LayerPass, waiting: Sequence[_Waiting]) -> _Waiting:
    """A call for later, beside others that wait.

    Its gradient is the very tensor that came: a copy may lie otherwise in memory, and would be rounded otherwise. All
    have one copy of the weight, for one that was gathered is let go when the pass has ended.
    """
    if waiting:
        weight, bias = waiting[0].layer.weight, waiting[0].layer.bias
    else:
        weight, bias = layer.weight.clone(), None if layer.bias is None else layer.bias.clone()
    return _Waiting(replace(layer, weight=weight, bias=bias), version_of(layer.g))
