"""Two passes in one call: the optimizer is given the minibatch, and runs it as often as it needs.

Run with ``python examples/loops/closure.py``.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points in the plane, labelled by the quarter they lie in."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x = torch.randn(64, 2, generator=generator)
        yield x, (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = KBFGS(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for x, y in batches(steps):
        # Any closure does that clears gradients, runs the passes on this minibatch, and returns the loss.
        loss = optimizer.step(Minibatch(model, F.cross_entropy, x, y))
        losses.append(float(loss))
        schedule.step()
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
