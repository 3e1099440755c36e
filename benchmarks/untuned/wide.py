"""Two networks, each at four widths."""

from functools import partial

import torch.nn.functional as F

from benchmarks.untuned import data
from benchmarks.untuned.choice import deepmlp, lenet
from benchmarks.untuned.problem import SmallProblem

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


WIDE = {name_of(network, width): make(width) for network, make in (("mlp", _mlp), ("cnn", _cnn)) for width in WIDTHS}
