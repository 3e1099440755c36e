"""Two networks, each at four widths, and the paper's autoencoder."""

from functools import partial

import torch.nn.functional as F

from benchmarks.untuned import data
from benchmarks.untuned.choice import deepmlp, lenet
from benchmarks.untuned.problem import SmallProblem
from workloads import nets
from workloads.losses import BINARY_CROSS_ENTROPY

WIDTHS = (1, 2, 4, 8)
NETWORKS = {"mlp": "eight tanh layers, digits", "cnn": "strided CNN without normalization, MNIST at 14×14"}


def name_of(network: str, width: int) -> str:
    return f"{network}-{width}"


def _mlp(width: int) -> SmallProblem:
    build = partial(deepmlp, 64 * width)
    return SmallProblem(f"{NETWORKS['mlp']}, ×{width}", build, lambda source: data.digits(), F.cross_entropy, 128)


def _cnn(width: int) -> SmallProblem:
    build, images = partial(lenet, 8 * width, 14), partial(data.images, number=4000, size=14)
    return SmallProblem(f"{NETWORKS['cnn']}, ×{width}", build, images, F.cross_entropy, 64)


_AUTOENCODER = SmallProblem(
    "the paper's autoencoder, MNIST",
    partial(nets.autoencoder, (784, 1000, 500, 250, 30, 250, 500, 1000, 784)),
    partial(data.pixels, number=60_000, size=28),
    BINARY_CROSS_ENTROPY.mean,
    1000,
    sampler=BINARY_CROSS_ENTROPY.sample,
)
_STACKS = {name_of(network, width): make(width) for network, make in (("mlp", _mlp), ("cnn", _cnn)) for width in WIDTHS}
WIDE = {**_STACKS, "ae-28": _AUTOENCODER}
