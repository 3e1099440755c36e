"""What everything is measured on: three of the paper's networks, each with one minibatch of random data."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from workloads.objective import minibatch
from workloads.workload import Workload, of_problem

PROBLEMS = {
    "resnet32": of_problem("resnet32-cifar10", 128),
    "vgg16": of_problem("vgg16-cifar10", 128),
    "autoencoder": of_problem("mnist", 1000),
}
# Small networks of the same kinds, to see that everything runs.
QUICK = {
    "resnet32": of_problem("resnet20-mnist", 4),
    "vgg16": of_problem("vgg8-mnist", 4),
    "autoencoder": of_problem("digits", 16),
}


@dataclass(frozen=True)
class Setup:
    """A network with one minibatch, on a device: what a contender is built from.

    Attributes:
        workload: What the network and the minibatch are.
        model: The network, a fresh one for each contender.
        x: Inputs.
        y: Targets.
    """

    workload: Workload
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def batch(self) -> Minibatch:
        """The minibatch as the closure that ``step`` takes: a forward and a backward pass."""
        return minibatch(self.model, self.workload.loss, self.x, self.y)

    @property
    def criterion(self) -> nn.Module:
        """The loss as a module, for packages that look at its type."""
        return nn.BCEWithLogitsLoss() if self.workload.classes is None else nn.CrossEntropyLoss()


def set_up(workload: Workload, device: torch.device) -> Setup:
    """Build a workload's network and data, the same at each call."""
    torch.manual_seed(0)
    model = workload.build().to(device)
    x, y = workload.data(device)
    return Setup(workload, model, x, y.round() if workload.classes is None else y)  # binary targets for BCE
