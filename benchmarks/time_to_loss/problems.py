"""What is trained, for how long, and to which losses: three networks on real MNIST."""

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F

from benchmarks.untuned.data import images, pixels
from benchmarks.untuned.problem import SmallProblem
from workloads import nets, problems

_AUTOENCODER = problems.PROBLEMS["mnist"]
_IMAGES, _SIZE = 60_000, 28


@dataclass(frozen=True)
class Race:
    """One problem.

    Attributes:
        problem: What is trained.
        seconds: What every run has, of the process.
        losses: To be reached, the highest first: means of ten minibatches, before their steps.
    """

    problem: SmallProblem
    seconds: float
    losses: tuple[float, ...]


def _classifier(title: str, build: partial) -> SmallProblem:
    data = partial(images, number=_IMAGES, size=_SIZE)
    return SmallProblem(title, build, data, F.cross_entropy, batch_size=128)


RACES = {
    "autoencoder": Race(
        SmallProblem(
            "MNIST autoencoder, minibatches of 1000",
            _AUTOENCODER.build,
            partial(pixels, number=_IMAGES, size=_SIZE),
            _AUTOENCODER.loss.mean,
            _AUTOENCODER.batch_size,
            _AUTOENCODER.loss.sample,
        ),
        seconds=24.0,
        losses=(150.0, 110.0, 90.0),
    ),
    "vgg": Race(
        _classifier("VGG8 on MNIST, minibatches of 128", partial(nets.vgg8, 10)),
        seconds=12.0,
        losses=(0.3, 0.1, 0.05),
    ),
    "resnet": Race(
        _classifier("ResNet8 on MNIST, minibatches of 128", partial(nets.resnet, 1, 1, 10)),
        seconds=12.0,
        losses=(0.3, 0.1, 0.05),
    ),
}
