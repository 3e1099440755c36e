"""What a layer is: ``h_t = W a_t`` at every location t, for linear and convolutional layers."""

from kfqn_ext.geometry.base import LayerGeometry, geometry_of, is_layer, refusal, register
from kfqn_ext.geometry.conv import ConvGeometry
from kfqn_ext.geometry.layer_pass import (
    LayerPass,
    Subsampling,
    checked_subsampling,
    fraction_size,
    layer_input,
    refuse_nested,
)
from kfqn_ext.geometry.linear import LinearGeometry

__all__ = [
    "ConvGeometry",
    "LayerGeometry",
    "LayerPass",
    "LinearGeometry",
    "Subsampling",
    "checked_subsampling",
    "geometry_of",
    "is_layer",
    "layer_input",
    "fraction_size",
    "refusal",
    "refuse_nested",
    "register",
]
