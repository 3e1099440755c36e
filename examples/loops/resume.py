"""Saving and resuming: a run that was stopped goes on as if it had not been. ``python examples/loops/resume.py``.

A checkpoint has the model, the optimizer with its H_A and H_G, the schedule, and torch's random numbers, from which
dropout draws. Load it before the first step.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

from kfqn_ext.optim import OnePassKBFGS

STEPS = 40


def train(file: Path, until: int) -> list[float]:
    """Train from the checkpoint, where there is one, to a step, and save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = OnePassKBFGS(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    done = 0
    if file.exists():
        checkpoint = torch.load(file, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        torch.set_rng_state(checkpoint["random"])
        done = checkpoint["done"]
    losses = []
    for step in range(done, until):
        x = torch.randn(64, 2, generator=torch.Generator().manual_seed(step))
        y = (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**states, "random": torch.get_rng_state(), "done": until}, file)
    return losses


def main() -> tuple[list[float], list[float]]:
    """Losses of a run that was stopped half-way and went on, and of one that was not."""
    with TemporaryDirectory() as folder:
        stopped = [loss for until in (STEPS // 2, STEPS) for loss in train(Path(folder, "stopped.pt"), until)]
        return stopped, train(Path(folder, "whole.pt"), STEPS)


if __name__ == "__main__":
    stopped, whole = main()
    print(f"last loss {stopped[-1]:.6f}, and {whole[-1]:.6f} without the stop")
