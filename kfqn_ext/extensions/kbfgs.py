"""The quantities of K-BFGS: means of a layer's patches, outputs and output gradients, and products with A."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated

import torch
from torch import Tensor, nn

from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import DATA, GRADIENTS, LOCATIONS, combined, over, shares
from kfqn_ext.geometry import LayerGeometry, LayerPass, Subsampling
from kfqn_ext.linalg import full_precision

# Sums over data and locations are pairwise: their relative error is a few ε whatever the number of terms.
_SUMMED = 16.0
# A number that arrives rounded is off by 0.2 ε (root mean square), one independently of the next.
_ARRIVED = 2.0

Probe = Callable[[nn.Module, Tensor], Tensor | None]


@dataclass(frozen=True)
class GramOperator:
    """A = (1/N) Σ_n Σ_t a_t a_tᵀ of the batches that a layer saw, never formed: use ``A @ s``.

    Attributes:
        geometry: The layer.
        inputs: Its inputs, one tensor a call.
    """

    geometry: LayerGeometry
    inputs: tuple[Tensor, ...]

    @classmethod
    def joined(cls, parts: Sequence["GramOperator"]) -> "GramOperator":
        """A of the batches of all parts together, of one layer."""
        return cls(parts[0].geometry, tuple(x for part in parts for x in part.inputs))

    @property
    def shape(self) -> tuple[int, ...]:
        """[*B, d_in, d_in]."""
        return (*self.geometry.blocks, self.geometry.d_in, self.geometry.d_in)

    def __matmul__(self, s: Tensor) -> Tensor:
        """Multiply A with a vector or a matrix, ``eq_14``.

        Args:
            s: [*B, d_in] or [*B, d_in, k].

        Returns:
            A s, shaped like ``s``.

        Raises:
            ValueError: If the shape of ``s`` does not fit.
        """
        with full_precision():
            return self.times(s)

    def times(self, s: Tensor) -> Tensor:
        """``A @ s`` in the precision that is set: [*B, d_in] or [*B, d_in, k] → the same; ValueError for others."""
        blocks, d = self.geometry.blocks, self.geometry.d_in
        if s.shape == (*blocks, d):
            return self.times(s.unsqueeze(-1)).squeeze(-1)
        if s.shape[:-1] != (*blocks, d):
            raise ValueError(
                f"A has shape {list(self.shape)}; it multiplies [{', '.join(map(str, (*blocks, d)))}] or "
                f"[{', '.join(map(str, (*blocks, d)))}, k], not {list(s.shape)}."
            )
        total = sum(x.shape[0] for x in self.inputs)
        s = s.to(self.inputs[0].dtype)
        products = [self.geometry.gram_product(x, s) * (x.shape[0] / total) for x in self.inputs]
        return sum(products[1:], start=products[0])


@dataclass(frozen=True)
class LayerMoments:
    """What K-BFGS needs from a layer in one pass. Means are over the N data and |T| locations.

    Attributes:
        a_bar: ā = mean of the patches a_t, [*B, d_in]; ends with 1 where the layer has a bias.
        h_bar: h̄ = mean of the outputs h_t, [*B, d_out].
        dh_bar: ∂h̄ = mean of the gradients of a datum's loss by h_t, [*B, d_out].
        dh_noise: A bound on the rounding error of ``dh_bar``, [*B, d_out]: the mean of |∂h_t|, for convolutions the
            mean over data of its root mean square over locations, which is not below and costs less, times
            max(16 ε, 2 ε' / √(N |T|)). ε is that of the working dtype, in which sums are taken; ε' that of the dtype
            in which ∂h_t arrived, rounded one by one. A ``dh_bar`` below it, as before BatchNorm, says nothing.
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
        operator: ``A``, or None where a probe let the inputs go.
        s: The probe's direction s = f(module, ā), [*B, d_in], or None.
        A_s: A s, [*B, d_in], or None.
    """

    a_bar: Annotated[Tensor, over(LOCATIONS)]
    h_bar: Annotated[Tensor, over(LOCATIONS)]
    dh_bar: Annotated[Tensor, over(GRADIENTS)]
    dh_noise: Annotated[Tensor, over(GRADIENTS)]
    num_data: int
    num_locations: float
    operator: Annotated[GramOperator | None, combined(GramOperator.joined)] = None
    s: Annotated[Tensor | None, combined(itemgetter(0))] = None
    A_s: Annotated[Tensor | None, over(DATA)] = None

    @property
    def A(self) -> GramOperator:
        """The operator A; ``q.A @ s`` is the minibatched product.

        Raises:
            MissingQuantitiesError: If a probe was used.
        """
        if self.operator is None:
            raise MissingQuantitiesError(
                "A is not available: with probe=..., inputs are let go once A s is known. "
                "Read s and A_s, or use KBFGSQuantities() without a probe."
            )
        return self.operator


class KBFGSQuantities(LayerExtension[LayerMoments]):
    """ā, h̄, ∂h̄ and products with A for each layer, in an ordinary backward pass.

    The result, a :class:`LayerMoments`, is ``weight.kbfgs`` and ``ext[module]``. Nothing is unfolded: ā is taken
    from the batch mean of the input, h̄ = W ā, and A s costs two products of the input with one
    column for each place of the kernel.

    Example:
        >>> import torch
        >>> from backpack import backpack
        >>> from kfqn_ext import extend
        >>> model = extend(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(inplace=True)))
        >>> with backpack(KBFGSQuantities()):
        ...     model(torch.rand(8, 1, 6, 6)).mean().backward()
        >>> q = model[0].weight.kbfgs
        >>> q.a_bar.shape, q.dh_bar.shape, q.num_data, q.num_locations
        (torch.Size([10]), torch.Size([4]), 8, 16)
        >>> (q.A @ q.a_bar).shape
        torch.Size([10])
    """

    savefield = "kbfgs"

    def __init__(
        self,
        reduction: str = "mean",
        subsampling: Subsampling = None,
        probe: Probe | None = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up the extension.

        Args:
            reduction: "mean" or "sum": what the loss does over the data of a batch.
            subsampling: Which data of each batch to measure: indices, a share (its first data, rounded up), or None for
                all.
            probe: ``f(module, a_bar) -> s``. A s is then computed at once and the input let go (where s is None,
                just let go); otherwise the result holds the layer's input for as long as it lives. A layer that is
                called several times in a pass is probed with its first call's ā.
            accumulate: Merge over backward passes (micro-batches) too, until ``clear()``.
            modules: Measure these layers only, whether or not their weight needs a gradient.
        """
        super().__init__(reduction, subsampling, accumulate, modules)
        self.probe = probe

    def measure(self, module: nn.Module, layer: LayerPass) -> LayerMoments:  # noqa: D102
        a_bar = layer.geometry.mean_patch(layer.x)
        return self._moments(layer, a_bar, None if self.probe is None else self.probe(module, a_bar))

    def add_gradient(self, module: nn.Module, old: LayerMoments, layer: LayerPass) -> LayerMoments:  # noqa: D102
        new, share = self._moments(layer, old.a_bar, None), shares(self.reduction)[GRADIENTS](layer, old)
        return replace(old, dh_bar=old.dh_bar + share * new.dh_bar, dh_noise=old.dh_noise + share * new.dh_noise)

    def measure_more(self, module: nn.Module, old: LayerMoments, layer: LayerPass) -> LayerMoments:  # noqa: D102
        return self._moments(layer, layer.geometry.mean_patch(layer.x), old.s)

    def _moments(self, layer: LayerPass, a_bar: Tensor, s: Tensor | None) -> LayerMoments:
        geometry = layer.geometry
        dh_bar, dh_noise = self._mean_gradient(layer)
        A = GramOperator(geometry, (layer.x,))
        return LayerMoments(
            a_bar=a_bar,
            h_bar=geometry.multiply(layer.weight, layer.bias, a_bar),
            dh_bar=dh_bar,
            dh_noise=dh_noise,
            num_data=layer.num_data,
            num_locations=layer.num_locations,
            operator=A if self.probe is None else None,
            s=s,
            A_s=None if s is None else A.times(s),
        )

    def _mean_gradient(self, layer: LayerPass) -> tuple[Tensor, Tensor]:
        """∂h̄ and its noise."""
        terms = layer.num_data * layer.num_locations
        mean = layer.grad_scale / terms
        relative = max(_SUMMED * torch.finfo(layer.g.dtype).eps, _ARRIVED * layer.eps / math.sqrt(terms))
        total, size = layer.geometry.sum_outputs(layer.g), layer.geometry.bound_sum_abs(layer.g)
        return total * mean, size * (mean * relative)


class ShiftInvariantQuantities(KBFGSQuantities):
    """The same for layers of which ∂h̄ = 0 is known, before a normalization: the output's gradient is not read."""

    def _mean_gradient(self, layer: LayerPass) -> tuple[Tensor, Tensor]:
        zero = layer.g.new_zeros((*layer.geometry.blocks, layer.geometry.d_out))
        return zero, zero
