"""Products with a layer's Fisher factor Γ, which is not formed: the output side of K-BFGS from a single pass."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated

import torch
from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import SQUARES, Mean, Pooling, combined, over
from kfqn_ext.extensions.shown import Shown, described
from kfqn_ext.geometry import LayerGeometry, LayerPass, Subsampling

OutputProbe = Callable[[nn.Module], tuple[Tensor, Tensor] | None]
"""``f(module) -> (s, kept)``: a direction, and what is handed on with the result; None for none of them."""


@dataclass(frozen=True, repr=False)
class FisherOperator:
    """Γ of the batches that a layer saw, never formed: use :meth:`times`.

    Attributes:
        geometry: The layer.
        gradients: Of the loss by its outputs, one tensor a call.
        weights: What the sum over data and locations of each counts in Γ.
    """

    geometry: LayerGeometry
    gradients: tuple[Tensor, ...]
    weights: tuple[float, ...]

    @classmethod
    def joined(cls, parts: Sequence["FisherOperator"], weights: Callable[[Mean], list[float]]) -> "FisherOperator":
        """Γ of the batches of all parts together, of one layer."""
        gradients = tuple(g for part in parts for g in part.gradients)
        scaled = zip(parts, weights(SQUARES), strict=True)
        return cls(parts[0].geometry, gradients, tuple(w * share for part, share in scaled for w in part.weights))

    def __repr__(self) -> str:
        """Describe the shapes of what Γ is made of."""
        return f"FisherOperator(of {', '.join(map(described, self.gradients))})"

    def times(self, s: Tensor) -> Tensor:
        """Γ s in the precision that is set: [*B, d_out, k] → the same."""
        pairs = list(zip(self.gradients, self.weights, strict=True))
        products = [self.geometry.gram_outputs_product(g, s.to(g.dtype)) * weight for g, weight in pairs]
        return sum(products[1:], start=products[0])


@dataclass(frozen=True, repr=False)
class FisherProduct(Shown):
    """What Γ does to directions. Γ = (1/N) Σ_n (1/|T|) Σ_t ∂h_t ∂h_tᵀ, with ∂h_t the gradient of one datum's loss.

    Attributes:
        s: The directions, [*B, d_out, k].
        Gamma_s: Γ s, [*B, d_out, k].
        trace: Mean eigenvalue tr(Γ) / d_out, [*B].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
        kept: What the probe has handed on.
        operator: Γ, where s waits for the end of the pass: s and Γ s are zero then.
    """

    s: Annotated[Tensor, combined(itemgetter(0))]
    Gamma_s: Annotated[Tensor, over(SQUARES)]
    trace: Annotated[Tensor, over(SQUARES)]
    num_data: int
    num_locations: float
    kept: Annotated[Tensor | None, combined(itemgetter(0))] = None
    operator: Annotated[FisherOperator | None, Pooling(FisherOperator.joined)] = None


class FisherProducts(LayerExtension[FisherProduct]):
    """Γ s and tr(Γ) / d_out of each layer for directions s that a probe chooses.

    The result is ``weight.fisher_product`` and ``ext[module]``. Γ is that of :class:`KFACFactors`: the empirical Fisher
    factor in a pass with the data's targets.
    """

    savefield = "fisher_product"

    def __init__(
        self,
        reduction: str = "mean",
        subsampling: Subsampling = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
        probe: OutputProbe | None = None,
    ) -> None:
        """Set up the extension.

        Args:
            reduction: See :class:`~kfqn_ext.extensions.base.LayerExtension`, as for what follows.
            subsampling: See there.
            accumulate: See there.
            modules: See there.
            probe: ``f(module) -> (s, kept)``, with s [*B, d_out, k]. Where that is None, and without a probe, s is a
                vector of ones. A layer that is called several times in a pass is probed at its first call.
        """
        super().__init__(reduction, subsampling, accumulate, modules)
        self.output_probe = probe
        self.late = False
        """Whether results hold gradients by outputs and Γ, for directions that are not known in the pass."""

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> FisherProduct:  # noqa: D102
        s = like.new_zeros(*geometry.blocks, geometry.d_out, 1)
        return FisherProduct(s, s, like.new_ones(geometry.blocks), 1, 1)

    def absent(self, module: nn.Module) -> FisherProduct:  # noqa: D102
        s, kept = (None if self.output_probe is None else self.output_probe(module)) or (None, None)
        blank = super().absent(module)
        return blank if s is None else replace(blank, s=s, Gamma_s=torch.zeros_like(s), kept=kept)

    def measure(self, module: nn.Module, layer: LayerPass) -> FisherProduct:  # noqa: D102
        chosen = None if self.output_probe is None else self.output_probe(module)
        if chosen is not None:
            return self._product(layer, *chosen)
        return self._product(layer, layer.g.new_ones(*layer.geometry.blocks, layer.geometry.d_out, 1), None)

    def measure_more(self, module: nn.Module, old: FisherProduct, layer: LayerPass) -> FisherProduct:  # noqa: D102
        return self._product(layer, old.s, old.kept)

    def _product(self, layer: LayerPass, s: Tensor, kept: Tensor | None) -> FisherProduct:
        geometry, g = layer.geometry, layer.g
        mean = layer.grad_scale**2 / (layer.num_data * layer.num_locations)
        squares = torch.linalg.vector_norm(geometry.outputs(g), dim=(0, 1, -1)).square()
        Gamma = FisherOperator(geometry, (g,), (mean,))
        return FisherProduct(
            s=torch.zeros_like(s) if self.late else s,
            Gamma_s=torch.zeros_like(s) if self.late else Gamma.times(s),
            trace=squares * (mean / geometry.d_out),
            num_data=layer.num_data,
            num_locations=layer.num_locations,
            kept=kept,
            operator=Gamma if self.late else None,
        )
