"""Sizes of a network's layers, on which costs depend."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfqn_ext.geometry import geometry_of


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one layer, in the paper's letters, summed over channel groups by its users.

    Attributes:
        J: J|Δ| of the paper, plus one where the layer has a bias.
        I: Output channels.
        T: |T|, spatial locations.
        groups: Channel groups; J and I are those of one.
    """

    J: int
    I: int  # noqa: E741
    T: int
    groups: int


def layer_sizes(model: nn.Module, x: Tensor) -> list[LayerSize]:
    """Sizes of all layers with a Kronecker block, from one forward pass."""
    sizes: list[LayerSize] = []
    handles = []
    for module in model.modules():
        geometry = geometry_of(module)
        if geometry is None:
            continue

        def note(module: nn.Module, args: object, output: Tensor, geometry=geometry) -> None:
            T = geometry.num_locations(geometry.as_batch(output))
            sizes.append(LayerSize(geometry.d_in, geometry.d_out, T, geometry.groups))

        handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return sizes
