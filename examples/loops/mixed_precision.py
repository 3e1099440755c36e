"""Mixed precision: autocast and a gradient scaler around the drop-in, as around Adam.

bfloat16 needs no scaler; one that is not enabled has the scale 1. Run it with
``python examples/loops/mixed_precision.py``.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points in the plane, labelled by the quarter they lie in."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x = torch.randn(64, 2, generator=generator)
        yield x.to(DEVICE), (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long().to(DEVICE)


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)
    optimizer = OnePassKBFGS(model)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DTYPE is torch.float16)
    losses = []
    for x, y in batches(steps):
        with torch.autocast(DEVICE, DTYPE):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
