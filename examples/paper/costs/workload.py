"""A network, a loss and one minibatch of random data: all that costs depend on."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from examples.paper.losses import CROSS_ENTROPY, Loss
from examples.paper.problems import PROBLEMS
from kfqn_ext.geometry import geometry_of


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        name: For tables.
        build: Makes the network.
        loss: The loss.
        shape: Shape of one input.
        classes: Number of classes; None where an input is its own target.
        batch_size: m.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    shape: tuple[int, ...]
    classes: int | None
    batch_size: int

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """One minibatch."""
        x = torch.rand(self.batch_size, *self.shape, device=device)
        return x, x if self.classes is None else torch.randint(self.classes, (self.batch_size,), device=device)


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


def of_problem(name: str, batch_size: int | None) -> Workload:
    """A problem's network and sizes, with random data."""
    p = PROBLEMS[name]
    return Workload(p.title, p.build, p.loss, p.shape, p.classes, batch_size or p.batch_size)


def of_model(path: str, shape: tuple[int, ...], classes: int, batch_size: int | None) -> Workload:
    """Any classifier: ``path`` is MODULE:FUNCTION, for example torchvision.models:resnet18."""
    module, _, function = path.partition(":")
    build = getattr(import_module(module), function)
    return Workload(path, build, CROSS_ENTROPY, shape, classes, batch_size or 128)


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
