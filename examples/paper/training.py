"""Training of one cell, which can stop after any epoch, or where a budget ends, and go on later as if it had not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import nn

from examples.paper.cell import Cell
from examples.paper.phases import PhaseClock
from workloads.data import Batch, Data, Split
from workloads.methods import METHODS
from workloads.objective import minibatch
from workloads.problems import PROBLEMS


@dataclass(frozen=True)
class Status:
    """Where a run is, for displays."""

    phase: str
    epoch: int
    step: int
    steps_per_epoch: int
    loss: float
    seconds: float


class Diverged(Exception):
    """The loss is no longer finite."""


class Training:
    """The state of one run: network, optimizer, clock, counters."""

    def __init__(self, cell: Cell, data: Data, device: torch.device) -> None:
        """Initialize network and optimizer from the cell's seed."""
        torch.manual_seed(cell.seed)
        self.cell, self.device = cell, device
        self.problem = PROBLEMS[cell.problem]
        train = data.train if cell.data_limit is None else data.train.first(cell.data_limit)
        self.train = train.to(device)
        self.valid = None if data.valid is None else data.valid.to(device)
        self.batch_size = self.problem.batch_size if cell.batch_size is None else cell.batch_size
        self.model = self.problem.build().to(device)
        self.optimizer = METHODS[cell.method].build(self.model, cell.settings)
        self.clock = PhaseClock(device)
        self.epoch = 0
        self.step = 0
        self._order: torch.Tensor | None = None  # of the data in the epoch that has begun
        self._total = torch.zeros((), dtype=torch.float64, device=device)  # of its minibatches' losses
        self._last_loss = math.nan
        self._at_a_time = 1 if device.type == "cpu" else 20  # clock and loss are read, which waits for the device

    # ------------------------------------------------------------------ the run

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.train) // self.batch_size)

    @property
    def last_full_epoch(self) -> int:
        """The iteration at which it ended."""
        return self.epoch * self.steps_per_epoch

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        cell = self.cell
        return (
            (cell.epochs is not None and self.epoch >= cell.epochs)
            or (cell.seconds is not None and self.clock.wall["train"] >= cell.seconds)
            or (cell.steps is not None and self.step >= cell.steps)
        )

    def start(self, watch: Callable[[Status], None]) -> dict[str, Any]:
        """Warm start; return the record of epoch 0, the initial network."""
        if hasattr(self.optimizer, "warm_start"):
            watch(self.status("warm start"))
            self.model.train()
            with self.clock.phase("warm_start"):
                self._warm_start()
        return self._record(math.nan, watch)

    def _warm_start(self) -> None:
        loader = self.train.in_order(self.batch_size, self.problem.normalize)
        forward = None
        if METHODS[self.cell.method].samples_targets:
            seeds = count(self.cell.seed)

            def forward(batch: Batch) -> None:
                minibatch(self.model, self.problem.loss, *batch).sampled(next(seeds))

        self.optimizer.warm_start(loader, forward, progress=False)

    def train_epoch(self, watch: Callable[[Status], None]) -> dict[str, Any]:
        """Train to the end of an epoch, or until the budget is used up; return its record.

        Raises:
            Diverged: If the loss is no longer finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.cell.lr_at(self.epoch)
        self.model.train()
        if self._order is None:
            self._order, self._total = torch.randperm(len(self.train)), torch.zeros_like(self._total)
        first, transform = self.step - self.last_full_epoch, self.problem.train_transform
        batches = self.train.shuffled(self._order, self.batch_size, transform, first)
        while not self.done:
            with self.clock.phase("train"):
                losses = [self._train_step(batch) for batch in islice(batches, self._steps_until_next_look())]
            if not losses:
                break
            self._total += torch.stack(losses).double().sum()
            self.step += len(losses)
            self._check(losses[-1])
            watch(self.status("train"))
        mean = self._total.item() / (self.step - self.last_full_epoch)
        if not math.isfinite(mean):
            raise Diverged(f"mean loss {mean} of epoch {self.epoch}")
        if self.step == self.last_full_epoch + self.steps_per_epoch:
            self.epoch, self._order = self.epoch + 1, None
        return self._record(mean, watch)

    def _train_step(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.optimizer.step(minibatch(self.model, self.problem.loss, *batch))
        return loss

    def _steps_until_next_look(self) -> int:
        left = math.inf if self.cell.steps is None else self.cell.steps - self.step
        return int(min(self._at_a_time, left))

    def _check(self, loss: torch.Tensor) -> None:
        self._last_loss = loss.item()
        if not math.isfinite(self._last_loss):
            raise Diverged(f"loss {self._last_loss} at iteration {self.step}")

    def status(self, phase: str) -> Status:
        return Status(phase, self.epoch, self.step, self.steps_per_epoch, self._last_loss, self.clock.wall["train"])

    # ------------------------------------------------------------------ evaluation

    def _record(self, minibatch_loss: float, watch: Callable[[Status], None]) -> dict[str, Any]:
        measured: dict[str, Any] = {"minibatch_loss": minibatch_loss if math.isfinite(minibatch_loss) else None}
        if self.done or self.epoch % self.cell.evaluate_every == 0:
            watch(self.status("evaluate"))
            with self.clock.phase("evaluate"):
                measured |= self._evaluation()
        if self.done:
            measured |= self._optimizer_state()
        lr = self.optimizer.param_groups[0]["lr"]
        # A fraction where the budget ended within an epoch.
        epoch = round(self.step / self.steps_per_epoch, 4)
        return {"epoch": epoch, "iteration": self.step, "lr": lr, **measured, **self.clock.record()}

    def _optimizer_state(self) -> dict[str, Any]:
        """Bytes of the optimizer's state, and how many curvature pairs each side kept, damped and skipped."""
        tensors = [(k, v) for state in self.optimizer.state.values() for k, v in state.items() if torch.is_tensor(v)]
        found: dict[str, Any] = {"state_bytes": sum(v.numel() * v.element_size() for _, v in tensors)}
        for side in ("A", "G"):
            counts = [v.reshape(3, -1).sum(1) for key, v in tensors if key == f"pairs_seen_{side}"]
            if counts:
                found[f"pairs_{side}"] = dict(zip(("kept", "damped", "skipped"), sum(counts).tolist(), strict=True))
        return found

    def _evaluation(self) -> dict[str, float | None]:
        """Training loss of an autoencoder on all its data; validation loss and accuracy of a CNN."""
        measured: dict[str, float | None] = {}
        if self.problem.kind == "autoencoder":
            measured["train_loss"] = self._evaluate(self.train)[0]
        if self.valid is not None:
            measured["valid_loss"], measured["valid_accuracy"] = self._evaluate(self.valid)
        return measured

    @torch.no_grad()
    def _evaluate(self, split: Split) -> tuple[float, float | None]:
        """Mean loss and, where there are labels, accuracy in percent."""
        was_training = self.model.training
        self.model.eval()
        loss, correct = 0.0, 0
        for x, y in split.in_order(self.batch_size, self.problem.normalize):
            output = self.model(x)
            loss += self.problem.loss.mean(output, y).item() * len(x)
            correct += (output.argmax(1) == y).sum().item() if split.y is not None else 0
        self.model.train(was_training)
        return loss / len(split), 100.0 * correct / len(split) if split.y is not None else None

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "clock": self.clock.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "order": self._order,
            "total": self._total,
            "random": _random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.clock.load_state_dict(state["clock"])
        self.epoch, self.step = state["epoch"], state["step"]
        self._order, self._total = state["order"], state["total"].to(self.device)
        _set_random_state(state["random"])


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
