"""Two networks of grouped convolutions, for a choice that none of the seven problems can tell about."""

from functools import partial

import torch.nn.functional as F
from torch import nn

from benchmarks.untuned import data
from benchmarks.untuned.problem import SmallProblem


def grouped() -> nn.Sequential:
    """3×3 convolutions in four groups, between pointwise ones, with BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, out, stride in ((16, 24, 2), (24, 32, 2)):
        layers += [nn.Conv2d(channels, channels, 3, stride, padding=1, groups=4, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, out, 1, bias=False)]
        layers += [nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def depthwise() -> nn.Sequential:
    """A group for each channel, without normalization."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for channels, out, stride in ((16, 24, 2), (24, 32, 2)):
        layers += [nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels), nn.Conv2d(channels, out, 1)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


_IMAGES = partial(data.images, number=4000, size=14)

GROUPED = {
    "grouped": SmallProblem("CNN with four groups, BatchNorm, MNIST at 14×14", grouped, _IMAGES, F.cross_entropy, 64),
    "depthwise": SmallProblem(
        "depthwise CNN without normalization, MNIST at 14×14", depthwise, _IMAGES, F.cross_entropy, 64
    ),
}
