"""A training loop of one's own: micro-batches, mixed precision, clipping, a learning-rate schedule, checkpoints.

The two passes of a step are two blocks around what the loop does anyway. Run with ``python examples/loops/plain.py``.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS

MICRO_BATCHES = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float16 needs a scaled loss, bfloat16 and float32 do not: a disabled scaler has the scale 1.
DTYPE = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points in the plane, labelled by the quarter they lie in."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x = torch.randn(64, 2, generator=generator)
        yield x.to(DEVICE), (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long().to(DEVICE)


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).to(DEVICE)
    optimizer = KBFGS.as_printed(model, lr=0.3, damping=1.0, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DTYPE is torch.float16)
    losses = []

    def forward_backward(x: Tensor, y: Tensor) -> float:
        total = 0.0
        for x_part, y_part in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            with torch.autocast(DEVICE, DTYPE):
                loss = F.cross_entropy(model(x_part), y_part) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += float(loss.detach())
        return total

    for x, y in batches(steps):
        optimizer.zero_grad()
        with optimizer.first_pass(loss_scale=scaler.get_scale()):
            losses.append(forward_backward(x, y))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        if optimizer.second_pass_due:
            with optimizer.second_pass(loss_scale=scaler.get_scale()):
                forward_backward(x, y)
        schedule.step()

    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    optimizer.load_state_dict(checkpoint["optimizer"])  # as when a run goes on
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
