"""Lightning's manual optimization: the two phases around ``manual_backward``.

Lightning wraps the optimizer; ``step`` goes through the wrapper, the phases are those of ``optimizer.optimizer``. On
several devices it hands over the model without its wrapper, so that the optimizer is told who trains together.
Automatic optimization works too: Lightning's closure repeats the batch, hooks of the module included. Needs
``pip install -e ".[examples]"``; run with ``python examples/loops/lightning_loop.py``.
"""

from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from kfqn_ext.optim import KBFGS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None


class Classifier(LightningModule):
    """Two layers, trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        group = torch.distributed.group.WORLD if self.trainer.world_size > 1 else None
        optimizer = KBFGS.as_printed(self.net, lr=0.3, damping=1.0, process_group=group)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        phases: KBFGS = optimizer.optimizer
        optimizer.zero_grad()
        with phases.first_pass():
            loss = self.loss(batch)
            self.manual_backward(loss)
        self.clip_gradients(optimizer, 10.0, "norm")
        optimizer.step()
        if phases.second_pass_due:
            with phases.second_pass():
                self.manual_backward(self.loss(batch))
        self.losses.append(float(loss.detach()))

    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()


def main(epochs: int = 4, folder: str | None = None) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()
    model = Classifier()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    if folder is not None:
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    return model.losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
