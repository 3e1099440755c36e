"""Hugging Face's Trainer with an optimizer of two passes: a subclass of eight lines.

``OnePassKBFGS`` needs none: ``Trainer(..., optimizers=(OnePassKBFGS(model), None))``. Needs
``pip install -e ".[examples]"``; run with ``python examples/loops/hugging_face.py``.
"""

from tempfile import TemporaryDirectory
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from transformers import Trainer, TrainingArguments

    from kfqn_ext.optim import KBFGS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None


class TwoPasses(Trainer):
    """The second pass over a minibatch runs before the first one over the next. No gradient accumulation."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
        phases: Any = self.optimizer.optimizer  # of Accelerate's wrapper
        if phases.second_pass_due:
            with phases.second_pass():
                super().training_step(model, self.before, *rest)
        self.before = inputs
        with phases.first_pass():
            return super().training_step(model, inputs, *rest)


class ModelWithLoss(nn.Module):
    """What the trainer takes: a module that is given columns of its data, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(points)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main(epochs: int = 4) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()
    rows = [{"points": point, "labels": label} for point, label in zip(x, y, strict=True)]
    model = ModelWithLoss()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=32,
            num_train_epochs=epochs,
            logging_steps=1,
            lr_scheduler_type="cosine",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = TwoPasses(model, arguments, train_dataset=rows, optimizers=(KBFGS(model), None))
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
