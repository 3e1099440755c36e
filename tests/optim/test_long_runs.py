"""5,000 steps of every member of the family on a small noisy CNN in float32, with curvature learned at every step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def net() -> nn.Sequential:
    """A convolution before BatchNorm, one with groups, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Tanh(),  # a group whose ReLUs are all dead has nothing to learn from, and rightly skips its pairs
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def noisy_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight images whose brightest third is the label, in three of four cases."""
    x = torch.randn(8, 1, 7, 7, generator=generator)
    y = torch.randint(3, (8,), generator=generator)
    bright = x[:, 0, :6].reshape(8, 3, 2, 7)
    bright[torch.arange(8), y] += 1.5
    wrong = torch.rand(8, generator=generator) < 0.25
    return x, torch.where(wrong, torch.randint(3, (8,), generator=generator), y)


@pytest.mark.parametrize("name", FAMILY)
def test_no_nan_and_every_H_positive_definite(name: str) -> None:
    torch.manual_seed(0)
    model, generator = net(), torch.Generator().manual_seed(1)
    optimizer, losses = FAMILY[name].make(model, lr=0.03, damping=0.3), []
    for k in range(1, 5001):
        losses.append(optimizer.step(Minibatch(model, F.cross_entropy, *noisy_batch(generator))))
        if k % 250 == 0:
            for d in optimizer.diagnostics(eigenvalues=True):
                assert d.A is not None and d.G is not None
                assert d.A.smallest > 0 and d.G.smallest > 0, (k, d)
            assert all(torch.isfinite(p).all() for p in model.parameters())
    history = torch.stack(losses)
    assert torch.isfinite(history).all()
    for group in optimizer.state.values():
        assert all(torch.isfinite(value).all() for value in group.values())
    # It trains, too: three classes, of which a sixth is mislabelled.
    assert history[-500:].mean() < 0.9 < history[:5].mean()
    # In curvature learned pair by pair, nearly every pair is used: a guard that skips them all would pass the above.
    for d in optimizer.diagnostics():
        assert d.A is not None and d.G is not None
        if d.A.kept:
            assert d.A.skipped <= 0.01 * d.A.kept
        if d.G.kept and d.name != "0":
            assert d.G.skipped <= 0.2 * d.G.kept
