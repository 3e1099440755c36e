"""One run: a network trained for so many seconds, with a rate that falls to zero over them."""

import math
import time
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.time_to_loss.grids import OPTIMIZERS
from benchmarks.time_to_loss.problems import RACES
from benchmarks.turns import first_line
from benchmarks.untuned.data import Source
from benchmarks.untuned.entry import Setting
from benchmarks.untuned.problem import minibatches
from benchmarks.untuned.training import cosine, finite
from workloads.clock import now

Curve = list[tuple[float, float | None]]
LAST = 10  # minibatches that a loss is the mean of
_CPU = torch.device("cpu")
_DIVERGED = 2.0


@dataclass(frozen=True)
class Heat:
    """What is run.

    Attributes:
        problem: Name of the problem.
        optimizer: Name of the optimizer.
        setting: What its ``build`` is called with.
        seed: Of the network's parameters and of the minibatches.
        seconds: How long, in seconds of the process.
        quick: On digits instead of MNIST.
    """

    problem: str
    optimizer: str
    setting: Setting
    seed: int
    seconds: float
    quick: bool


def outcome(run: Heat, source: Source) -> dict[str, Any]:
    """Train, and say what was run and how it went: seconds and loss after each step, and what went wrong."""
    started, curve, error = time.perf_counter(), [], None
    try:
        _train(run, source, curve)
    except Exception as raised:
        error = first_line(raised)
    return {**asdict(run), "curve": curve, "error": error, "wall": round(time.perf_counter() - started, 2)}


def _train(run: Heat, source: Source, curve: Curve) -> None:
    problem, entry = RACES[run.problem].problem, OPTIMIZERS[run.optimizer]
    torch.manual_seed(run.seed)
    model, data = problem.build(), problem.data(source)
    optimizers = entry.build(model, **run.setting)
    spent, share, losses = 0.0, cosine(run.seconds), []
    # By seconds and not by steps: the rate of a slow optimizer falls to zero in the same time.
    schedules = [LambdaLR(optimizer, lambda _: share(spent)) for optimizer in optimizers]
    for batch in minibatches(problem, model, data, run.seed):
        start = now(_CPU)
        loss = entry.step(optimizers, batch)
        spent += now(_CPU) - start
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
        mean = fmean(losses[-LAST:])
        curve.append((round(spent, 4), finite(mean)))
        if spent >= run.seconds or not math.isfinite(mean) or mean > _DIVERGED * losses[0]:
            return


def reached(curve: Curve, loss: float) -> float | None:
    """Seconds until the loss was no higher for the first time, of full means; None for never."""
    return next((seconds for seconds, mean in curve[LAST - 1 :] if mean is not None and mean <= loss), None)


def final(record: dict[str, Any]) -> float:
    """The last loss; infinite where the run broke off or diverged."""
    curve = record["curve"]
    if record["error"] or not curve or curve[-1][0] < record["seconds"] or curve[-1][1] is None:
        return math.inf
    return curve[-1][1]
