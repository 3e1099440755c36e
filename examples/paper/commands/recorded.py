"""``recorded``: KFAC beside the run that the authors' code of 2020 recorded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor, nn
from tqdm import tqdm

from examples.paper.commands.machine import Machine
from kfqn_ext.optim import KFAC, running_mean
from kfqn_ext.optim.inverses import GammaInverse, OmegaInverse
from workloads import environment, records
from workloads.losses import BINARY_CROSS_ENTROPY
from workloads.nets import autoencoder
from workloads.objective import minibatch
from workloads.problems import MNIST_WIDTHS

RECORD = {1: 183.0, 2: 135.0, 3: 99.7, 4: 82.5, 8: 64.1}
"""Training loss by epoch, which has 5e-6 ‖W‖² added: 0.01 at the start."""
THEIR_SEED, THEIR_BATCH_SIZE = 9999, 1000


@dataclass(frozen=True)
class Recorded:
    """Repeat the authors' recorded run of KFAC on the MNIST autoencoder, at (0.1, 3).

    Initial weights, order of the data, averages and the steps with new inverses are those of their code of 2020. The
    sampled targets can't be: it draws them on a GPU. Each seed for them is a run.

    Example: python -m examples.paper recorded --data-root data
    """

    targets: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds for the sampled targets."""
    seed: int = THEIR_SEED
    """Seed of the initial weights and of the order of the data; the record's is 9999."""
    epochs: int = 4
    """Epochs of each run."""
    batch_size: int = THEIR_BATCH_SIZE
    """m; the record's is 1000."""
    out: Path = Path("runs/recorded.jsonl")
    """File of JSON lines. Lines are added, runs that it has are not made again."""
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()

    def main(self) -> None:
        device, threads = self.machine.torch_device(), self.machine.threads_for(1)
        images = self.machine.load("mnist").train.x.to(device)
        self._check(len(images))
        environment.prepare(threads)
        done = {(_which(run), _epochs(run)) for run in records.read(self.out)}
        for targets in self.targets:
            which = {"seed": self.seed, "targets": targets, "batch_size": self.batch_size}
            if (_which(which), self.epochs) in done:
                continue
            result = train(images, self.seed, targets, self.epochs, self.batch_size)
            origin = environment.origin("examples.paper", device)
            records.append(self.out, {"kind": "recorded", **which, "epochs": self.epochs, **result, **origin})
        Console().print(Markdown(render(self.out)))

    def _check(self, images: int) -> None:
        if not 1 <= self.batch_size <= images:
            raise SystemExit(f"--batch-size {self.batch_size}: of {images} images, a minibatch has 1 to {images}.")
        if self.epochs < 1:
            raise SystemExit(f"--epochs {self.epochs}: nothing is recorded before the end of an epoch. Give 1 or more.")


def _which(run: dict[str, Any]) -> tuple[int, int, int]:
    """Seeds and batch size; the earliest logs say no batch size, which was the record's."""
    return run["seed"], run["targets"], run.get("batch_size", THEIR_BATCH_SIZE)


def _epochs(run: dict[str, Any]) -> int:
    """How many epochs were asked for; the earliest logs do not say, and have at least those that ended."""
    return run.get("epochs", len(run["losses"]))


def train(images: Tensor, seed: int, targets: int, epochs: int, batch_size: int) -> dict[str, object]:
    """Train; return the loss by epoch, and the step at which it left all bounds, or None."""
    torch.manual_seed(seed)
    model = autoencoder(MNIST_WIDTHS).to(images.device)
    optimizer = KFAC(
        model,
        lr=0.1,
        damping=3.0,
        stats_update_freq=1,
        inverse_update_freq=inverse_frequency,
        momentum=0.9,
        recipe=replace(
            KFAC.recipe_stable, input_inverse=OmegaInverse(running_mean()), output_inverse=GammaInverse(running_mean())
        ),
    )
    torch.manual_seed(targets)
    first = evaluate(model, images, batch_size)
    losses: list[float] = []
    steps = len(images) // batch_size
    bar = tqdm(batches(images, seed, epochs, batch_size), total=epochs * steps, desc=f"seed {seed}, targets {targets}")
    for k, x in enumerate(bar, start=1):
        loss = float(optimizer.step(minibatch(model, BINARY_CROSS_ENTROPY, x, x)))
        if not loss < 10 * first:
            return {"losses": losses, "diverged_at": k}
        if k % steps == 0:
            losses.append(evaluate(model, images, batch_size))
            bar.set_postfix(epoch=k // steps, loss=f"{losses[-1]:.2f}")
    return {"losses": losses, "diverged_at": None}


def inverse_frequency(k: int) -> int:
    """T₂: new inverses at the code's steps 0 to 20, 40, 60, …; here steps are counted from 1."""
    return 1 if k <= 21 or k % 20 == 1 else k + 1


def batches(images: Tensor, seed: int, epochs: int, batch_size: int) -> Iterator[Tensor]:
    """Minibatches in the code's order, which is shuffled anew each time, from the order before."""
    rng, order = np.random.RandomState(seed), np.arange(len(images))
    for _ in range(epochs):
        permutation = np.arange(len(images))
        rng.shuffle(permutation)
        order = order[permutation]
        for start in range(0, len(images) - batch_size + 1, batch_size):
            rng.permutation(batch_size)  # the order of the data in its second pass, which changes nothing else
            yield images[torch.from_numpy(order[start : start + batch_size]).to(images.device)]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, batch_size: int) -> float:
    """Mean loss over all images."""
    parts = images.split(batch_size)
    losses = [float(BINARY_CROSS_ENTROPY.mean(model(x), x)) * len(x) for x in parts]
    return sum(losses) / len(images)


def render(path: Path) -> str:
    """Table of the runs in a file, with their distance from the record, and the machines that they ran on.

    Of runs that differ in their epochs alone, it has the longest.
    """
    import pandas as pd  # takes its time

    from examples.paper.page import markdown

    longest = {_which(run): run for run in sorted(records.read(path), key=_epochs)}
    runs = sorted(longest.values(), key=lambda run: (_label(run) != str(THEIR_SEED), _which(run)))
    epochs = range(1, max((len(run["losses"]) for run in runs), default=0) + 1)
    rows = [{"seed": "the record", **{str(e): f"{RECORD[e]:g}" for e in epochs if e in RECORD}}]
    for run in runs:
        row = {"seed": _label(run), "targets": run["targets"], **_beside(run["losses"])}
        if run["diverged_at"] is not None:
            row[str(len(run["losses"]) + 1)] = f"diverged at step {run['diverged_at']}"
        rows.append(row)
    for label in dict.fromkeys(_label(run) for run in runs):
        whole = [run["losses"] for run in runs if _label(run) == label and run["diverged_at"] is None]
        if len(whole) > 1:
            means = [sum(losses) / len(losses) for losses in zip(*whole, strict=False)]
            rows.append({"seed": label, "targets": "mean", **_beside(means)})
    frame = pd.DataFrame(rows, columns=["seed", "targets", *map(str, epochs)], dtype=object)
    return "\n\n".join([markdown(frame), *sorted({environment.one_line(run["environment"]) for run in runs})]) + "\n"


def _label(run: dict[str, Any]) -> str:
    """The seed, and the batch size where it is not the record's."""
    seed, _, batch_size = _which(run)
    return str(seed) if batch_size == THEIR_BATCH_SIZE else f"{seed}, m = {batch_size}"


def _beside(losses: list[float]) -> dict[str, str]:
    """Losses by epoch, each with its distance from the record."""
    return {
        str(epoch): f"{loss:.2f}" + (f" ({loss / RECORD[epoch] - 1:+.1%})" if epoch in RECORD else "")
        for epoch, loss in enumerate(losses, start=1)
    }
