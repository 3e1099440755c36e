"""In bfloat16 curvature is learned as in float32: rounded gradients are no reason to learn nothing from them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS

STEPS = 40


def autoencoder() -> nn.Sequential:
    sizes = [64, 50, 20, 8, 20, 50, 64]
    layers: list[nn.Module] = []
    for i, (wide, narrow) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers += [nn.Linear(wide, narrow), nn.ReLU() if i not in (2, 5) else nn.Identity()]
    return nn.Sequential(*layers)


def kept(how: str) -> list[int]:
    """Pairs of ∂h̄ that each layer has learned from in 40 steps of training."""
    torch.manual_seed(0)
    model, data = autoencoder(), (torch.rand(400, 8) @ torch.randn(8, 64)).sigmoid()
    if how == "parameters":
        model, data = model.bfloat16(), data.bfloat16()
    optimizer = KBFGS.as_printed(model, lr=0.03, damping=0.3, curvature_update_freq=1)
    for i in range(STEPS):
        x = data[i % 4 * 100 :][:100]

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext():
                z = model(x)
            loss = F.binary_cross_entropy_with_logits(z.float(), x.float(), reduction="sum") / len(x)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return [layer.G.kept for layer in optimizer.diagnostics()]


@pytest.mark.parametrize("how", ["float32", "autocast", "parameters"])
def test_pairs_are_kept(how: str) -> None:
    assert min(kept(how)) >= 0.9 * STEPS


class Read(nn.Module):
    """A convolution before BatchNorm whose output is read once, or once more."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), twice
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = F.relu(self.norm(h))
        return self.head((y + h if self.twice else y).mean((2, 3)))


@pytest.mark.parametrize("twice", [False, True])
def test_what_is_spared_before_a_normalization(twice: bool) -> None:
    torch.manual_seed(0)
    model: Any = Read(twice)
    optimizer = KBFGS.as_printed(model, lr=0.3, damping=1.0, curvature_update_freq=1)
    x, y = torch.randn(64, 3, 12, 12), torch.arange(64) % 4
    for _ in range(8):

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    learned = {layer.name: layer.G.kept for layer in optimizer.diagnostics()}
    assert learned == {"conv": 8 if twice else 0, "head": 8}
