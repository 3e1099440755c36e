"""The problems, as data: a network, a loss, a data set, a batch size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from workloads import datasets, nets
from workloads.augment import crop_and_flip, normalizer
from workloads.data import Data
from workloads.losses import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, SQUARED_ERROR, Loss


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        title: Its name in tables and figures.
        kind: What the paper compares on it: training loss of an autoencoder, validation accuracy of a CNN.
        build: Makes the network, initialized from torch's global random numbers.
        load: (directory, whether to download) ↦ data.
        shape: Shape of one input.
        classes: Number of classes; None where an input is its own target.
        loss: The loss.
        batch_size: m.
        augment: Applied to each minibatch of training inputs.
        normalize: Applied to all inputs, after ``augment``.
        like: The paper's problem whose hyperparameters and budget it borrows, where it is not one of those.
    """

    title: str
    kind: Literal["autoencoder", "cnn"]
    build: Callable[[], nn.Module]
    load: Callable[[Path, bool], Data]
    shape: tuple[int, ...]
    loss: Loss
    batch_size: int
    classes: int | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    normalize: Callable[[Tensor], Tensor] | None = None
    like: str | None = None

    def train_transform(self, x: Tensor) -> Tensor:
        x = x if self.augment is None else self.augment(x)
        return x if self.normalize is None else self.normalize(x)


# table_3
MNIST_WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
FACES_WIDTHS = (625, 2000, 1000, 500, 30, 500, 1000, 2000, 625)
CURVES_WIDTHS = (784, 400, 200, 100, 50, 25, 6, 25, 50, 100, 200, 400, 784)
DIGITS_WIDTHS = (64, 48, 24, 8, 24, 48, 64)


def _autoencoder(
    title: str, widths: tuple[int, ...], load: Callable[[Path, bool], Data], loss: Loss, **rest
) -> Problem:
    build = partial(nets.autoencoder, widths)
    return Problem(title, "autoencoder", build, load, widths[:1], loss, **{"batch_size": 1000, **rest})


def _cifar(net: str, build: Callable[[int], nn.Module], classes: int) -> Problem:
    load = {10: datasets.cifar10, 100: datasets.cifar100}[classes]
    statistics = {  # of the training images, by channel
        10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    }[classes]
    return Problem(
        f"{net}, CIFAR-{classes}",
        "cnn",
        partial(build, classes),
        load,
        (3, 32, 32),
        CROSS_ENTROPY,
        batch_size=128,
        classes=classes,
        augment=crop_and_flip,
        normalize=normalizer(*statistics),
    )


def _mnist_cnn(net: str, build: Callable[[], nn.Module], like: str) -> Problem:
    return Problem(
        f"{net}, MNIST",
        "cnn",
        build,
        datasets.mnist_images,
        (1, 28, 28),
        CROSS_ENTROPY,
        batch_size=128,
        classes=10,
        normalize=normalizer((0.1307,), (0.3081,)),
        like=like,
    )


def _resnet32(classes: int) -> nn.Module:
    return nets.resnet(5, 3, classes)


PROBLEMS: dict[str, Problem] = {
    "mnist": _autoencoder("MNIST", MNIST_WIDTHS, datasets.mnist_vectors, BINARY_CROSS_ENTROPY),
    "faces": _autoencoder("FACES", FACES_WIDTHS, datasets.faces, SQUARED_ERROR),
    "curves": _autoencoder("CURVES", CURVES_WIDTHS, datasets.curves, BINARY_CROSS_ENTROPY),
    "vgg16-cifar10": _cifar("VGG16", nets.vgg16, 10),
    "resnet32-cifar10": _cifar("ResNet32", _resnet32, 10),
    "vgg16-cifar100": _cifar("VGG16", nets.vgg16, 100),
    "resnet32-cifar100": _cifar("ResNet32", _resnet32, 100),
    # Not the paper's:
    "curves-generated": _autoencoder(
        "generated curves", CURVES_WIDTHS, datasets.generated_curves, BINARY_CROSS_ENTROPY, like="curves"
    ),
    "digits": _autoencoder(
        "digits", DIGITS_WIDTHS, datasets.digits, BINARY_CROSS_ENTROPY, batch_size=200, like="mnist"
    ),
    "vgg8-mnist": _mnist_cnn("VGG8", partial(nets.vgg8, 10), "vgg16-cifar10"),
    "resnet20-mnist": _mnist_cnn("ResNet20", partial(nets.resnet, 3, 1, 10), "resnet32-cifar10"),
}
