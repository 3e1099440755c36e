"""Small networks in float64 for the tests of the curvature tools."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

F64 = torch.float64
N, CLASSES = 4, 3


def squared(z: Tensor, y: Tensor) -> Tensor:
    """Half the squared distance to the classes' unit vectors, a mean over data."""
    target = nn.functional.one_hot(y, z.shape[-1]).to(z)
    return 0.5 * (z - target).square().sum(-1).mean()


LOSSES = {"cross entropy": cross_entropy, "squared": squared}


class Residual(nn.Module):
    """A convolution whose output is normalized, added to in place, and rectified in place."""

    def __init__(self, activation: nn.Module, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(4)
        self.activation = activation
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.activation(self.first(x))
        h = self.norm(self.second(skip))
        h += skip
        h = self.activation(h)
        return self.last(self.dropout(nn.functional.avg_pool2d(h, 2).flatten(1)))


class Twice(nn.Module):
    """One layer called twice, on two parts of the input or (``feeds_itself``) on its own output."""

    def __init__(self, feeds_itself: bool = False) -> None:
        super().__init__()
        self.feeds_itself = feeds_itself
        self.shared = nn.Linear(5, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x[:, :2]))
        second = torch.sigmoid(self.shared(h if self.feeds_itself else x[:, 2:]))
        return self.last(h.sum(1) * second.sum(1))


class PerLocation(nn.Module):
    """Any layer, an activation, a mean over locations (channels last for a linear layer), a linear layer."""

    def __init__(self, layer: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation
        self.mixing = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(self.activation(self.layer(x)).flatten(1))


def ready(model: nn.Module, x: Tensor) -> nn.Module:
    """In float64, with lazy parameters made and BatchNorm's running statistics not at their initial values."""
    model = model.double().train()
    with torch.no_grad():
        for _ in range(2):
            model(x)
    return model.eval()


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape, dtype=F64), torch.randint(CLASSES, (N,))


def residual(activation: nn.Module | None = None, groups: int = 1, **_: Any) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = images(2, 4, 4)
    return ready(Residual(activation or nn.Tanh(), groups), x), x, y
