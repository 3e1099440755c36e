"""The extensions of one pass: made as the rules ask for them, read layer by layer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.extensions import (
    FisherProducts,
    InputQuantities,
    LayerExtension,
    LayerMoments,
    OutputProbe,
    Probe,
    SingleCalls,
)
from kfqn_ext.optim.inverses import Measured
from kfqn_ext.optim.inverses.base import Kind
from kfqn_ext.optim.passes.draws import Draws
from kfqn_ext.optim.passes.reading import Reading

_FALSE = torch.zeros((), dtype=torch.bool, device="cpu")


class Results(dict[nn.Module, Measured]):
    """What a pass has shown of each layer's module; it fills when the pass ends.

    Attributes:
        reading: What the layers were given; None where nobody looked.
        draws: The random numbers of the pass; likewise.
        repeats: Of a second pass, whether it had the data and random numbers of the first, as far as is known, bool [].
    """

    reading: Reading | None = None
    draws: Draws | None = None
    repeats: Tensor = ~_FALSE

    def like(self, quantities: Mapping[nn.Module, Measured]) -> "Results":
        """Other quantities of the same pass."""
        new = Results(quantities)
        new.reading, new.draws, new.repeats = self.reading, self.draws, self.repeats
        return new

    def not_finite(self) -> Tensor:
        """Whether an output gradient that was measured is not finite, bool []."""
        seen = [values for measured in self.values() for q in measured for values in _of_gradients(q)]
        return torch.stack([torch.isfinite(v).all() for v in seen]).all().logical_not() if seen else _FALSE


def _of_gradients(quantity: Any) -> list[Tensor]:
    """What of a quantity tells whether the output's gradients were finite."""
    if isinstance(quantity, LayerMoments):
        return [quantity.dh_bar]
    Gamma = getattr(quantity, "Gamma", None)
    return [] if Gamma is None else [Gamma.diagonal(dim1=-2, dim2=-1)]


@dataclass(frozen=True)
class Probes:
    """What chooses the directions in which a layer's factors are looked at, A s and Γ s; None for none.

    Attributes:
        A: ``f(module, a_bar) -> s``.
        G: ``f(module) -> s``.
        keep_inputs: Whether A waits for the end of all passes, with the layers' inputs kept until then.
        late_G: Whether Γ does, with the gradients by the layers' outputs: other processes choose directions.
    """

    A: Probe
    G: OutputProbe | None = None
    keep_inputs: bool = False
    late_G: bool = False


class Measurement:
    """What one pass is to measure, and has measured, of which modules."""

    def __init__(
        self,
        wanted: Mapping[Kind, Iterable[nn.Module]],
        reduction: str,
        probes: Probes,
        loss_scale: float | None = None,
        fraction_of: Callable[[Kind], float] = lambda kind: 1.0,
        of_grad: bool = False,
        single: SingleCalls | None = None,
        pools: bool = False,
    ) -> None:
        """Make the extensions.

        Args:
            wanted: Modules by extension.
            reduction: "mean" or "sum": what the loss does over data.
            probes: Choose directions for each layer.
            loss_scale: What the loss is multiplied with, where it is.
            fraction_of: The fraction of each batch, its first data, that an extension sees which can do with a part.
            of_grad: Whether passes count only where they add to ``.grad``.
            single: Layers that are known to be called once in a pass; the inputs of others are kept, so that A is
                looked at in the direction of all calls. Small calls of these are measured as one batch.
            pools: Whether results are to be pooled with those of other processes, which look at A afterwards.
        """
        self._single, self._pools = single, pools
        self._wanted = {kind: list(modules) for kind, modules in wanted.items()}
        self._by_kind: list[tuple[Kind, LayerExtension[Any]]] = []
        for kind, modules in self._wanted.items():
            fraction = fraction_of(kind) if kind.in_part else 1.0
            part = fraction if fraction < 1 else None
            ext = kind(reduction=reduction, subsampling=part, accumulate=True, modules=modules)  # over passes, as .grad
            ext.loss_scale = loss_scale
            ext.of_grad = of_grad
            if single is not None:
                ext.waits = lambda module: module not in single
            ext.mirrored = False  # the optimizer's own results die with the step
            if isinstance(ext, InputQuantities):
                ext.probe = None if pools else probes.A
                ext.late = lambda module: probes.keep_inputs or (single is not None and module not in single)
            if isinstance(ext, FisherProducts):
                ext.output_probe, ext.late = (None if probes.late_G else probes.G), probes.late_G
            self._by_kind.append((kind, ext))

    @property
    def extensions(self) -> tuple[LayerExtension[Any], ...]:
        """What ``backpack(...)`` is to activate."""
        return tuple(ext for _, ext in self._by_kind)

    @property
    def only_empty_batches(self) -> bool:
        """Whether layers were reached, but never with a datum."""
        reached = any(ext.saw_empty_batch for ext in self.extensions)
        return reached and self.reached_nothing

    @property
    def reached_nothing(self) -> bool:
        """Whether no layer was measured."""
        return not any(len(ext) for ext in self.extensions)

    @property
    def lacks_loss_scale(self) -> bool:
        """Whether gradients came in float16 and nobody said how the loss was scaled."""
        return any(ext.saw_half and ext.loss_scale is None for ext in self.extensions)

    def quantities(self) -> dict[nn.Module, dict[Kind, Any]]:
        """What was measured, by module and extension; the passes are over."""
        found: dict[nn.Module, dict[Kind, Any]] = {}
        for kind, ext in self._by_kind:
            ext.forget_cleared()
            ext.finish(self._single)
            for module, quantity in ext.items():
                found.setdefault(module, {})[kind] = quantity
        return found

    def results(self) -> Results:
        """What was measured, by module; where it is to be pooled, of all modules that were asked for, in their order.

        So all processes send the same numbers in the same order, whatever each has seen.
        """
        found = self.quantities()
        if self._pools:
            extensions, own = dict(self._by_kind), found
            found = {module: {} for modules in self._wanted.values() for module in modules}
            for kind, modules in self._wanted.items():
                for module in modules:
                    measured = own.get(module, {}).get(kind)
                    found[module][kind] = extensions[kind].absent(module) if measured is None else measured
        return Results({module: Measured(quantities) for module, quantities in found.items()})
