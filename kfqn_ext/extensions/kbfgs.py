"""The quantities of K-BFGS: means of a layer's patches, outputs and output gradients, and products with A."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from kfqn_ext._torch import rows_among_zeros
from kfqn_ext.extensions.inputs import Chosen, InputMoments, InputQuantities
from kfqn_ext.extensions.pooling import GRADIENTS, LOCATIONS, over, shares
from kfqn_ext.geometry import LayerGeometry, LayerPass, geometry_of

# Sums over data and locations are pairwise: their relative error is a few ε whatever the number of terms.
_SUMMED = 16.0
# A number that arrives rounded is off by 0.2 ε (root mean square), one independently of the next.
_ARRIVED = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerMoments(InputMoments):
    """What K-BFGS needs from a layer in one pass. Means are over the N data and |T| locations.

    Attributes:
        a_bar: ā = mean of the patches a_t, [*B, d_in]; ends with 1 where the layer has a bias.
        h_bar: h̄ = mean of the outputs h_t, [*B, d_out].
        dh_bar: ∂h̄ = mean of the gradients of a datum's loss by h_t, [*B, d_out].
        dh_noise: A bound on the rounding error of ``dh_bar``, [*B, d_out]: m max(16 ε, 2 ε' / √(N |T|)), with m the
            mean of |∂h_t| over data and locations. For convolutions m is a bound on it that costs less, the mean over
            data of the root mean square over locations. ε is that of the working dtype, in which sums are taken. ε'
            is that of the dtype in which ∂h_t arrived. A ``dh_bar`` below it, as before BatchNorm, says nothing.
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
        operator: ``A``, or None where a probe let the inputs go.
        s: The probe's direction s = f(module, ā), [*B, d_in], or several, [*B, d_in, k], or None.
        A_s: A s, shaped like s, or None.
        kept: What the probe has handed on, or None.
    """

    h_bar: Annotated[Tensor, over(LOCATIONS)]
    dh_bar: Annotated[Tensor, over(GRADIENTS)]
    dh_noise: Annotated[Tensor, over(GRADIENTS)]


class KBFGSQuantities(InputQuantities[LayerMoments]):
    """ā, h̄, ∂h̄ and products with A for each layer, in an ordinary backward pass.

    The result, a :class:`LayerMoments`, is ``weight.kbfgs`` and ``ext[module]``. Arguments and costs are those of
    :class:`InputQuantities`; h̄ = W ā.

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
        >>> q.A
        GramOperator([10, 10] of [8, 1, 6, 6])
    """

    savefield = "kbfgs"

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> LayerMoments:  # noqa: D102
        inputs, h = super().blank(geometry, like), like.new_zeros(*geometry.blocks, geometry.d_out)
        return LayerMoments(**vars(inputs), h_bar=h, dh_bar=h, dh_noise=h)

    def add_gradient(self, module: nn.Module, old: LayerMoments, layer: LayerPass) -> LayerMoments:  # noqa: D102
        share = shares(self.reduction)[GRADIENTS](layer, old)
        dh_bar, dh_noise = _mean_gradient(layer)
        return replace(old, dh_bar=old.dh_bar + share * dh_bar, dh_noise=old.dh_noise + share * dh_noise)

    def _result(self, layer: LayerPass, a_bar: Tensor, chosen: Chosen, keeps: bool) -> LayerMoments:
        inputs, (dh_bar, dh_noise) = self._inputs(layer, a_bar, chosen, keeps), _mean_gradient(layer)
        h_bar = layer.geometry.multiply(layer.weight, layer.bias, a_bar)
        return LayerMoments(**vars(inputs), h_bar=h_bar, dh_bar=dh_bar, dh_noise=dh_noise)


def with_outputs(module: nn.Module, moments: InputMoments) -> InputMoments:
    """h̄ = W ā from a mean patch that has changed, as it was pooled; W as it is now.

    Where W is divided, with the rows that this process holds: the sum over processes is h̄.

    Args:
        module: The layer.
        moments: Its result; one without h̄ is returned as it is.
    """
    if not isinstance(moments, LayerMoments):
        return moments
    layer: Any = module
    weight = rows_among_zeros(layer.weight.detach()).to(moments.a_bar)
    bias = None if layer.bias is None else rows_among_zeros(layer.bias.detach()).to(moments.a_bar)
    geometry = cast(LayerGeometry, geometry_of(module))
    return replace(moments, h_bar=geometry.multiply(weight, bias, moments.a_bar))


def _mean_gradient(layer: LayerPass) -> tuple[Tensor, Tensor]:
    """∂h̄ and its noise."""
    terms = layer.num_data * layer.num_locations
    mean = layer.grad_scale / terms
    relative = max(_SUMMED * torch.finfo(layer.g.dtype).eps, _ARRIVED * layer.eps / math.sqrt(terms))
    total, size = layer.geometry.sum_outputs(layer.g), layer.geometry.bound_sum_abs(layer.g)
    return total * mean, size * (mean * relative)
