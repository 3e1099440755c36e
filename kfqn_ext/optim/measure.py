"""The extensions of one pass: made as the recipe's sides ask for them, read layer by layer."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.extensions import (
    FactorTraces,
    InputGram,
    InputQuantities,
    KBFGSQuantities,
    KFACFactors,
    LayerExtension,
    LayerMoments,
    Probe,
)
from kfqn_ext.geometry import Subsampling
from kfqn_ext.optim.sides import Measured
from kfqn_ext.optim.sides.base import Kind

_FALSE = torch.zeros((), dtype=torch.bool, device="cpu")


class Measurement:
    """What one pass is to measure, and has measured, of which modules."""

    def __init__(
        self,
        wanted: Mapping[Kind, Iterable[nn.Module]],
        reduction: str,
        probe: Probe | None,
        loss_scale: float | None = None,
        shares: tuple[float, float] = (1.0, 1.0),
        shift_invariant: Collection[nn.Module] = (),
    ) -> None:
        """Make the extensions.

        Args:
            wanted: Modules by kind of quantity.
            reduction: "mean" or "sum": what the loss does over data.
            probe: Chooses the direction s of A s for each layer, or None; without it, the layers' inputs are kept.
            loss_scale: What the loss is multiplied with, where it is.
            shares: Of which share of each batch to take the moments, in general and where ∂h̄ = 0 is known; all else is
                taken of the whole.
            shift_invariant: Modules of which ∂h̄ = 0 is known.
        """
        self._by_kind: list[tuple[Kind, LayerExtension[Any]]] = []
        for kind, modules in wanted.items():
            spared = [m for m in modules if m in shift_invariant] if kind == "moments" else []
            rest = [m for m in modules if m not in spared]
            if spared:
                inputs: LayerExtension[Any] = InputQuantities(reduction, _subsampling(shares[1]), probe, modules=spared)
                self._by_kind.append((kind, inputs))
            if rest:
                self._by_kind.append((kind, _make(kind, rest, reduction, probe, shares[0])))
        for ext in self.extensions:
            ext.loss_scale = loss_scale
            ext.mirrored = False  # the optimizer's own results die with the step
            ext.accumulate = True  # over backward passes, as .grad does

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

    def not_finite(self) -> Tensor:
        """Whether an output gradient that was measured is not finite, bool []."""
        seen = [q.dh_bar for _, ext in self._by_kind for q in ext.values() if isinstance(q, LayerMoments)]
        factors = [q for kind, ext in self._by_kind if kind == "factors" for q in ext.values()]
        seen += [q.Gamma.diagonal(dim1=-2, dim2=-1) for q in factors]
        return torch.stack([torch.isfinite(v).all() for v in seen]).all().logical_not() if seen else _FALSE

    def of(self, module: nn.Module) -> Measured:
        """What was measured of a module."""
        return Measured(**{kind: ext[module] for kind, ext in self._by_kind if module in ext})


def _make(
    kind: Kind, modules: list[nn.Module], reduction: str, probe: Probe | None, share: float
) -> LayerExtension[Any]:
    if kind == "moments":
        return KBFGSQuantities(reduction, _subsampling(share), probe, modules=modules)
    if kind == "gram":
        return InputGram(modules=modules)
    if kind == "factors":
        return KFACFactors(reduction, modules=modules)
    return FactorTraces(reduction, modules=modules)


def _subsampling(share: float) -> Subsampling:
    return share if share < 1 else None
