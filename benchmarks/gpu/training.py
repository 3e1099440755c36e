"""Two epochs of training: the one-pass row beside SGD-m and Adam, on MNIST where it is, and on digits elsewhere."""

import time
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.place import Place
from benchmarks.report import markdown
from benchmarks.untuned.data import Source, images
from benchmarks.untuned.lists import ENTRIES
from benchmarks.untuned.problem import SmallProblem, mean_loss, minibatches
from workloads import nets
from workloads.clock import wait
from workloads.data import Data

_EPOCHS, _QUICK_STEPS = 2, 2
_SETTINGS: dict[str, dict[str, float]] = {"onepass": {}, "sgdm": {"lr": 0.03}, "adam": {"lr": 3e-3}}
_MNIST = Path("MNIST/raw/train-images-idx3-ubyte")


def measure(place: Place) -> dict[str, Any]:
    """By optimizer: seconds, steps, and the losses at the end."""
    source = Source(place.data_root, quick=place.quick or not (place.data_root / _MNIST).exists())
    there = images(source, 60_000, 28)
    data = Data(*(split.to(place.device) for split in (there.train, there.valid)))
    problem = SmallProblem("VGG8", lambda: nets.vgg8(10).to(place.device), lambda source: data, F.cross_entropy, 128)
    rows = {name: _train(place, problem, data, name, setting) for name, setting in _SETTINGS.items()}
    return {"data": "digits" if source.quick else "MNIST", "rows": rows}


def _train(place: Place, problem: SmallProblem, data: Data, name: str, setting: dict[str, float]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, entry = problem.build(), ENTRIES[name]
    optimizers = entry.build(model, **setting)
    steps = _QUICK_STEPS if place.quick else _EPOCHS * (len(data.train) // problem.batch_size)
    start, losses = time.perf_counter(), []
    for batch in islice(minibatches(problem, model, data, 0), steps):
        losses.append(entry.step(optimizers, batch).detach())  # and not its number, for which the host would wait
    wait(place.device)
    seconds = time.perf_counter() - start
    train, valid = fmean(loss.item() for loss in losses[-10:]), mean_loss(problem, model, data.valid)
    return {"seconds": seconds, "steps": steps, "training loss": train, "validation loss": valid}


def render(found: dict[str, Any]) -> str:
    rows = [[f"VGG8 on {found['data']}", "steps", "ms a step", "training loss", "validation loss"]]
    for name, row in found["rows"].items():
        ms = f"{1e3 * row['seconds'] / row['steps']:.2f}"
        losses = (f"{row[key]:.4f}" for key in ("training loss", "validation loss"))
        rows.append([name, str(row["steps"]), ms, *losses])
    return markdown(rows)
