"""With its default learning rate and damping, every optimizer is stable from the first step on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import resnet18

from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.targets import bernoulli
from tests.optim.family import FAMILY, firsts, rows

images, labels = load_digits(return_X_y=True)
X, Y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def per_image(z: Tensor, x: Tensor) -> Tensor:
    """Binary cross entropy summed over pixels, averaged over data."""
    return F.binary_cross_entropy_with_logits(z, x, reduction="sum") / len(x)


def autoencoder() -> nn.Module:
    widths = [64, 100, 50, 10, 50, 100, 64]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    del layers[5]  # the code layer is linear
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(256, 10),
    )


def colour_resnet() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Upsample(32), nn.Conv2d(1, 3, 1), resnet18(num_classes=10))


TASKS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "autoencoder": (autoencoder, per_image, True),
    "cnn": (cnn, F.cross_entropy, False),
}
# A class, and its form as printed.
FORMS = firsts(lambda member: member.build, rows(lambda member: member.has_defaults))
each = pytest.mark.parametrize("name", FORMS)


def train(make: Any, build: Callable[[], nn.Module], loss_fn: Any, reconstruct: bool, steps: int, size: int) -> Tensor:
    model = build()
    optimizer = make(model)
    sampler = bernoulli if reconstruct else None
    losses = []
    for _ in range(steps):
        index = torch.randint(len(X), (size,))
        x = X[index]
        losses.append(optimizer.step(Minibatch(model, loss_fn, x, x if reconstruct else Y[index], sampler)))
    return torch.stack(losses)


@pytest.mark.parametrize("task", ["autoencoder", pytest.param("cnn", marks=pytest.mark.slow)])
@each
def test_the_loss_falls_from_the_first_step(name: str, task: str) -> None:
    losses = train(FAMILY[name].build, *TASKS[task], steps=80, size=128)
    assert losses.isfinite().all()
    assert losses.max() < 1.2 * losses[0]
    assert losses[-10:].mean() < 0.8 * losses[0]


def headless(size: float) -> nn.Module:
    """A network whose last layer starts at zero, or almost: at first the gradients of all others are as small."""
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 10))
    with torch.no_grad():
        model[4].weight.mul_(size)
    return model


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("name", [name for name in FORMS if FAMILY[name].sets_length])
def test_layers_without_a_gradient_at_first_learn_later(name: str, size: float) -> None:
    losses = train(FAMILY[name].build, partial(headless, size), F.cross_entropy, False, steps=80, size=128)
    assert losses.isfinite().all()
    assert losses[-10:].mean() < 0.5 * losses[0]


@pytest.mark.slow
@each
def test_a_resnet_trains(name: str) -> None:
    build = FAMILY[name].build
    if FAMILY[name].takes("inverse_update_freq"):  # inverses of such matrices, seldom
        build = partial(build, inverse_update_freq=20)
    losses = train(build, colour_resnet, F.cross_entropy, False, steps=40, size=32)
    assert losses.isfinite().all()
    assert losses[-5:].mean() < 0.8 * losses[0]
