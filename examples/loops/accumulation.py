"""Micro-batches that make one step, and a clipped gradient. Run with ``python examples/loops/accumulation.py``.

Curvature is that of the whole batch, since every backward pass that adds to ``.grad`` is measured. Clipping changes the
gradient alone: what was measured stays as it is.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points in the plane, labelled by the quarter they lie in."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x = torch.randn(64, 2, generator=generator)
        yield x, (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()


def main(steps: int = 60, parts: int = 4, largest_norm: float = 1.0) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = OnePassKBFGS(model)
    losses = []
    for x, y in batches(steps):
        total = 0.0
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(x_part), y_part) / parts
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
