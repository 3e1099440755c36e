"""Traces of a layer's two factors, for splits of the damping that look at their sizes."""

from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

import torch
from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import DATA, SQUARES, over
from kfqn_ext.extensions.shown import Shown
from kfqn_ext.geometry import LayerGeometry, LayerPass


@dataclass(frozen=True, kw_only=True, repr=False)
class InputTrace(Shown):
    """The mean eigenvalue of A: its trace over its size.

    Attributes:
        A: tr(A) / d_in, [*B].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    A: Annotated[Tensor, over(DATA)]
    num_data: int
    num_locations: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Traces(InputTrace):
    """Mean eigenvalues of A and of the (empirical) Fisher factor Γ: their traces over their sizes.

    Attributes:
        A: tr(A) / d_in, [*B].
        G: tr(Γ) / d_out, [*B].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    G: Annotated[Tensor, over(SQUARES)]


T = TypeVar("T", bound=InputTrace)


class InputTraces(LayerExtension[T]):
    """tr(A) / d_in of each layer, A's mean eigenvalue, without forming A. The output's gradient is not read.

    The result, an :class:`InputTrace`, is ``weight.input_trace`` and ``ext[module]``.
    """

    savefield = "input_trace"

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> T:  # noqa: D102
        return cast(T, InputTrace(A=like.new_ones(geometry.blocks), num_data=1, num_locations=1))

    def measure(self, module: nn.Module, layer: LayerPass) -> T:  # noqa: D102
        return cast(T, _of_inputs(layer))

    def add_gradient(self, module: nn.Module, old: T, layer: LayerPass) -> T:  # noqa: D102
        return old


class FactorTraces(InputTraces[Traces]):
    """tr(A) / d_in and tr(Γ) / d_out of each layer, the factors' mean eigenvalues, without forming A or Γ.

    The result, :class:`Traces`, is ``weight.factor_traces`` and ``ext[module]``. A and Γ are those of
    :class:`KFACFactors`.
    """

    savefield = "factor_traces"
    add_gradient = LayerExtension.add_gradient

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> Traces:  # noqa: D102
        return Traces(**vars(super().blank(geometry, like)), G=like.new_ones(geometry.blocks))

    def measure(self, module: nn.Module, layer: LayerPass) -> Traces:  # noqa: D102
        squared = torch.linalg.vector_norm(layer.geometry.outputs(layer.g), dim=(0, 1, -1)).square()
        G = squared * (layer.grad_scale**2 / (layer.num_data * layer.num_locations))
        return Traces(**vars(_of_inputs(layer)), G=G / layer.geometry.d_out)


def _of_inputs(layer: LayerPass) -> InputTrace:
    A = layer.geometry.trace(layer.x, layer.num_locations) / layer.geometry.d_in
    return InputTrace(A=A, num_data=layer.num_data, num_locations=layer.num_locations)
