"""The seven problems that choices are made on."""

from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.untuned import data
from benchmarks.untuned.layers import Apply, Positions, transformer_block
from benchmarks.untuned.problem import SmallProblem
from workloads import nets
from workloads.losses import BINARY_CROSS_ENTROPY

_CONTEXT, _WIDTH = 48, 64


def lenet(width: int = 8, size: int = 28) -> nn.Sequential:
    convolutions = [
        *(nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(2 * width, 3 * width, 3, stride=2, padding=1), nn.ReLU()),
    ]
    places, hidden = (-(-size // 8)) ** 2, 6 * width
    head = [nn.Flatten(), nn.Linear(3 * width * places, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*convolutions, *head)


def deepmlp(width: int = 64) -> nn.Sequential:
    widths = 64, *8 * [width]
    hidden = [module for d_in, d_out in pairwise(widths) for module in (nn.Linear(d_in, d_out), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def regression() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))


def _convolution(channels: int, out: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out)]


def vggbn() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, out in ((1, 12), (12, 12), (12, 24), (24, 24)):
        layers += [*_convolution(channels, out), nn.ReLU()]
        if channels == out:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * 9, 10))


class ResidualConvolutions(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_convolution(channels, out, stride), nn.ReLU(), *_convolution(out, out))
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


def resnet() -> nn.Sequential:
    blocks = [ResidualConvolutions(8, 8, 1), ResidualConvolutions(8, 16, 2), ResidualConvolutions(16, 32, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*_convolution(1, 8), nn.ReLU(), *blocks, *head)


def autoencoder() -> nn.Sequential:
    """The paper's for MNIST, two fifths as wide and on a quarter of the pixels."""
    return nets.autoencoder((196, 400, 200, 100, 12, 100, 200, 400, 196))


def gpt() -> nn.Sequential:
    embedding = nn.Embedding(len(data.ALPHABET), _WIDTH)
    blocks = [transformer_block(_WIDTH, 4, causal=True) for _ in range(2)]
    head = [nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, len(data.ALPHABET)), Apply(_classes_second)]
    return nn.Sequential(embedding, Positions(_CONTEXT, _WIDTH), *blocks, *head)


def _classes_second(x: Tensor) -> Tensor:
    return x.transpose(1, 2)  # as F.cross_entropy takes them


_SMALL, _LARGE = partial(data.images, number=4000, size=14), partial(data.images, number=6000, size=28)

CHOICE = {
    "lenet": SmallProblem("strided CNN without normalization, MNIST", lenet, _LARGE, F.cross_entropy, 100),
    "deepmlp": SmallProblem("eight tanh layers, digits", deepmlp, lambda source: data.digits(), F.cross_entropy, 128),
    "regression": SmallProblem(
        "20 badly scaled inputs, GELU, squared error", regression, lambda source: data.badly_scaled(), F.mse_loss, 256
    ),
    "vggbn": SmallProblem("CNN with BatchNorm, MNIST at 14×14", vggbn, _SMALL, F.cross_entropy, 64),
    "resnet": SmallProblem("residual CNN with BatchNorm, MNIST at 14×14", resnet, _SMALL, F.cross_entropy, 64),
    "ae": SmallProblem(
        "autoencoder, MNIST at 14×14, cross entropy summed over pixels",
        autoencoder,
        partial(data.pixels, number=6000, size=14),
        BINARY_CROSS_ENTROPY.mean,
        128,
        sampler=BINARY_CROSS_ENTROPY.sample,
    ),
    "gpt": SmallProblem(
        "two causal attention blocks with LayerNorm, Python source",
        gpt,
        lambda source: data.program_text(_CONTEXT),
        F.cross_entropy,
        16,
    ),
}
