"""One optimizer in loops and trainers as they are, on scikit-learn's digits: each takes the steps of a loop by hand."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kfqn_ext.optim import OnePassKBFGS
from tests.real.trainers import example, learned, their_warnings

PARTS, CLIP = 2, 0.5  # micro-batches of a step, and the largest norm of its gradient


def digits() -> TensorDataset:
    """1280 of them."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[:1280] / 16, dtype=torch.float32), torch.tensor(labels[:1280]))


def loader() -> DataLoader[Any]:
    return DataLoader(digits(), batch_size=32)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))


def by_hand() -> tuple[nn.Module, list[float]]:
    model, losses = net(), []
    optimizer = OnePassKBFGS(model)
    for k, (x, y) in enumerate(loader(), start=1):
        loss = F.cross_entropy(model(x), y)
        (loss / PARTS).backward()
        losses.append(float(loss.detach()))
        if k % PARTS == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def as_by_hand(model: nn.Module, losses: list[float]) -> None:
    """And to half of the first loss."""
    want, of_hand = by_hand()
    learned(losses)
    assert losses == of_hand
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), want.parameters(), strict=True))


def plain() -> None:
    learned(example("drop_in").main(1))
    _, losses = by_hand()
    learned(losses)


def lightning() -> None:
    """Automatic optimization: all micro-batches but the last are run by the trainer, and the last by a closure."""
    with their_warnings():
        pytest.importorskip("lightning")
        from lightning.pytorch import LightningModule, Trainer

        class Classifier(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.losses = net(), []

            def configure_optimizers(self) -> Any:
                return OnePassKBFGS(self.net)

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.losses.append(float(loss.detach()))
                return loss

        module = Classifier()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=CLIP, accumulate_grad_batches=PARTS, **quiet
        )
        trainer.fit(module, loader())
    as_by_hand(module.net, module.losses)


def accelerate() -> None:
    with their_warnings():
        pytest.importorskip("accelerate")
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # that of other tests
        accelerator, losses = Accelerator(cpu=True, gradient_accumulation_steps=PARTS), []
        model = net()
        prepared, optimizer, batches = accelerator.prepare(model, OnePassKBFGS(model), loader())
        for x, y in batches:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    as_by_hand(model, losses)


class Named(nn.Module):
    """What Hugging Face's trainer takes: a module that is given columns of its data, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), []

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        loss = F.cross_entropy(logits, labels)
        self.losses.append(float(loss.detach()))
        return {"loss": loss, "logits": logits}


def hugging_face() -> None:
    with their_warnings(), TemporaryDirectory() as folder:
        for name in ("transformers", "accelerate"):
            pytest.importorskip(name)
        from torch.utils.data import SequentialSampler
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

        model = Named()
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=32, gradient_accumulation_steps=PARTS, num_train_epochs=1,
            max_grad_norm=CLIP, lr_scheduler_type="constant", use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        rows = [{"pixels": x, "labels": y} for x, y in digits()]
        InOrder(model, arguments, train_dataset=rows, optimizers=(OnePassKBFGS(model), None)).train()
    as_by_hand(model.net, model.losses)
