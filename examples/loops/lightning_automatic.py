"""Lightning's automatic optimization: return the optimizer, and the trainer does the rest.

``OnePassKBFGS`` is as any other here, with accumulation and clipping by the trainer. ``KBFGS`` works too: Lightning's
closure repeats the batch when curvature is due, hooks of the module included. Needs
``pip install -e ".[examples]"``; run with ``python examples/loops/lightning_automatic.py``.
"""

from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from kfqn_ext.optim import OnePassKBFGS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None


class OnePassClassifier(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return OnePassKBFGS(self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(float(loss.detach()))
        return loss


def main(epochs: int = 4) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()
    model = OnePassClassifier()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, gradient_clip_val=1.0, accumulate_grad_batches=2, **quiet
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    return model.losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
