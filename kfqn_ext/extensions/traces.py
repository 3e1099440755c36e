"""Traces of a layer's two factors, for splits of the damping that look at their sizes."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import DATA, SQUARES, over
from kfqn_ext.extensions.shown import Shown
from kfqn_ext.geometry import LayerGeometry, LayerPass


@dataclass(frozen=True, repr=False)
class Traces(Shown):
    """Mean eigenvalues of A and of the (empirical) Fisher factor Γ: their traces over their sizes.

    Attributes:
        A: tr(A) / d_in, [*B].
        G: tr(Γ) / d_out, [*B].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    A: Annotated[Tensor, over(DATA)]
    G: Annotated[Tensor, over(SQUARES)]
    num_data: int
    num_locations: float


class FactorTraces(LayerExtension[Traces]):
    """tr(A) / d_in and tr(Γ) / d_out of each layer, the factors' mean eigenvalues, without forming A or Γ.

    The result is ``weight.factor_traces`` and ``ext[module]``. A and Γ are those of :class:`KFACFactors`.
    """

    savefield = "factor_traces"

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> Traces:  # noqa: D102
        return Traces(like.new_ones(geometry.blocks), like.new_ones(geometry.blocks), 1, 1)

    def measure(self, module: nn.Module, layer: LayerPass) -> Traces:  # noqa: D102
        # E_n Σ_t ‖a_t‖²: a patch of the batch mean of x² holds the mean squares of a patch of x. (A homogeneous 1
        # is its own square.)
        x_squared = layer.x.square().mean(0, keepdim=True)  # a norm over the data costs a CPU ten times as much
        A = layer.geometry.mean_patch(x_squared).sum(-1) * layer.num_locations
        g_squared = torch.linalg.vector_norm(layer.geometry.outputs(layer.g), dim=(0, 1, -1)).square()
        G = g_squared * (layer.grad_scale**2 / (layer.num_data * layer.num_locations))
        return Traces(A / layer.geometry.d_in, G / layer.geometry.d_out, layer.num_data, layer.num_locations)
