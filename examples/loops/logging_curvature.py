"""Logging what each layer has learned, to TensorBoard and to Weights & Biases.

``diagnostics().as_dict()`` is flat, with Python's numbers, as loggers take them. It waits for the device: once an epoch
is enough. Needs ``pip install tensorboard wandb``; run with ``python examples/loops/logging_curvature.py``. W&B writes
to the folder alone where ``WANDB_MODE=offline`` is set, and needs no account then.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from kfqn_ext.optim import OnePassKBFGS

Log = Callable[[Mapping[str, float], int], None]  # (numbers by name, step)


def to_tensorboard(folder: str) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def to_wandb(project: str) -> Log:
    import wandb

    run = wandb.init(project=project)
    return lambda numbers, step: run.log(dict(numbers), step=step)


def main(*logs: Log, epochs: int = 3, batches: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = OnePassKBFGS(model)
    losses = []
    for epoch in range(1, epochs + 1):
        for _ in range(batches):
            x = torch.randn(64, 2)
            loss = F.cross_entropy(model(x), (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        numbers = {"loss": losses[-1], **optimizer.diagnostics().as_dict()}  # "0/H_A/kept", "0/leverage", …
        for log in logs:
            log(numbers, epoch * batches)
    return losses


if __name__ == "__main__":
    try:
        losses = main(to_tensorboard("runs/tensorboard"), to_wandb("kfqn-ext"))
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: pip install tensorboard wandb") from None
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
