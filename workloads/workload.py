"""A network, a loss and one minibatch of random data: all that costs depend on."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from workloads.losses import CROSS_ENTROPY, Loss
from workloads.problems import PROBLEMS

# Of steps on it: curvature of random data says nothing, so these only have to keep the loss finite.
LR, DAMPING = 1e-6, 1.0
NEVER = 10**9  # how rarely curvature is updated in a step that is not due


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


def of_problem(name: str, batch_size: int | None) -> Workload:
    """A problem's network and sizes, with random data."""
    p = PROBLEMS[name]
    return Workload(p.title, p.build, p.loss, p.shape, p.classes, batch_size or p.batch_size)


def of_model(path: str, shape: tuple[int, ...], classes: int, batch_size: int | None) -> Workload:
    """Any classifier: ``path`` is MODULE:FUNCTION, for example torchvision.models:resnet18."""
    module, _, function = path.partition(":")
    build = getattr(import_module(module), function)
    return Workload(path, build, CROSS_ENTROPY, shape, classes, batch_size or 128)
