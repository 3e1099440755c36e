"""The extensions of one pass: made as the recipe's sides ask for them, read layer by layer."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.extensions import FactorPower, InputGram, KBFGSQuantities, KFACFactors, LayerExtension
from kfqn_ext.extensions.kbfgs import Probe
from kfqn_ext.optim.sides import Measured
from kfqn_ext.optim.sides.base import Kind

_FALSE = torch.zeros((), dtype=torch.bool)


class Measurement:
    """What one pass is to measure, and has measured, of which modules."""

    def __init__(
        self,
        wanted: Mapping[Kind, Iterable[nn.Module]],
        reduction: str,
        probe: Probe | None,
        loss_scale: float | None = None,
        share: float = 1.0,
    ) -> None:
        """Make the extensions.

        Args:
            wanted: Modules by kind of quantity.
            reduction: "mean" or "sum": what the loss does over data.
            probe: Chooses the direction s of A s for each layer, or None; without it, the layers' inputs are kept.
            loss_scale: What the loss is multiplied with, where it is.
            share: Of which share of each batch to take the moments; all else is taken of the whole.
        """
        self._by_kind: dict[Kind, LayerExtension[Any]] = {}
        for kind, modules in wanted.items():
            modules = list(modules)
            if modules:
                self._by_kind[kind] = _make(kind, modules, reduction, probe, share)
                self._by_kind[kind].loss_scale = loss_scale

    @property
    def extensions(self) -> tuple[LayerExtension[Any], ...]:
        """What ``backpack(...)`` is to activate."""
        return tuple(self._by_kind.values())

    @property
    def only_empty_batches(self) -> bool:
        """Whether layers were reached, but never with a datum."""
        reached = any(ext.saw_empty_batch for ext in self._by_kind.values())
        return reached and self.reached_nothing

    @property
    def reached_nothing(self) -> bool:
        """Whether no layer was measured."""
        return not any(len(ext) for ext in self._by_kind.values())

    @property
    def lacks_loss_scale(self) -> bool:
        """Whether gradients came in float16 and nobody said how the loss was scaled."""
        return any(ext.saw_half and ext.loss_scale is None for ext in self._by_kind.values())

    def not_finite(self) -> Tensor:
        """Whether an output gradient that was measured is not finite, bool []."""
        moments, factors = self._by_kind.get("moments"), self._by_kind.get("factors")
        seen = [] if moments is None else [q.dh_bar for q in moments.values()]
        seen += [] if factors is None else [q.Gamma.diagonal(dim1=-2, dim2=-1) for q in factors.values()]
        return torch.stack([torch.isfinite(v).all() for v in seen]).all().logical_not() if seen else _FALSE

    def of(self, module: nn.Module) -> Measured:
        """What was measured of a module."""
        return Measured(**{kind: ext[module] for kind, ext in self._by_kind.items() if module in ext})


def _make(
    kind: Kind, modules: list[nn.Module], reduction: str, probe: Probe | None, share: float
) -> LayerExtension[Any]:
    ext: LayerExtension[Any]
    if kind == "moments":
        ext = KBFGSQuantities(reduction, subsampling=share if share < 1 else None, probe=probe, modules=modules)
    elif kind == "gram":
        ext = InputGram(modules=modules)
    elif kind == "factors":
        ext = KFACFactors(reduction, modules=modules)
    else:
        ext = FactorPower(reduction, modules=modules)
    ext.mirrored = False  # the optimizer's own results die with the step
    ext.accumulate = True  # over backward passes, as .grad does
    return ext
