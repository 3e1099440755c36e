"""One run: a problem trained by an optimizer with one setting, and what is kept of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.turns import first_line
from benchmarks.untuned.data import Source
from benchmarks.untuned.entry import Entry, Optimizers, Setting
from benchmarks.untuned.problem import SmallProblem, mean_loss, minibatches
from kfqn_ext.optim import Minibatch
from workloads.clock import now

Rate = Callable[[int], float]  # number of the step ↦ share of the rate
_CPU = torch.device("cpu")
_LAST = 10  # minibatches that a loss is the mean of
_POINTS = 50  # of a curve
_DIVERGED = 2.0


def train(
    problem: SmallProblem,
    entry: Entry,
    setting: Setting,
    steps: int,
    seed: int,
    source: Source,
    schedule: Callable[[int], Rate] | None = None,
) -> dict[str, Any]:
    """Train with a rate that falls to zero as a cosine, unless a schedule for so many steps is given.

    Returns:
        What :func:`summary` makes of it, the loss on validation data at the end, and what went wrong, if anything.
    """
    losses: list[float] = []
    seconds: list[float] = []
    valid, error = math.nan, None
    try:
        if entry.samples and not problem.samples:
            raise ValueError("no distribution of targets is known for this loss")
        torch.manual_seed(seed)
        model, data = problem.build(), problem.data(source)
        optimizers = entry.build(model, **setting)
        torch.manual_seed(seed)  # noise in the network is the same, whatever an optimizer has drawn
        batches = islice(minibatches(problem, model, data, seed), steps)
        for loss, spent in descend(entry, optimizers, batches, (schedule or cosine)(steps)):
            losses.append(loss)
            seconds.append(spent)
            if not math.isfinite(loss):
                break
        else:
            valid = mean_loss(problem, model, data.valid)
    except Exception as raised:
        error = first_line(raised)
    return {**summary(losses, seconds), "valid": finite(valid), "error": error}


def descend(
    entry: Entry, optimizers: Optimizers, batches: Iterable[Minibatch], rate: Rate
) -> Iterator[tuple[float, float]]:
    """Loss of each minibatch before its step, and the seconds of this process that the step took."""
    schedules = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    for batch in batches:
        start = now(_CPU)
        loss = entry.step(optimizers, batch)
        spent = now(_CPU) - start
        for schedule in schedules:
            schedule.step()
        yield loss.item(), spent


def cosine(steps: int) -> Rate:
    """From one to zero."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step / steps, 1)))


def summary(losses: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """What is kept of a run.

    Args:
        losses: One a step, of the minibatch before the step; the last may be infinite.
        seconds: What each step took.

    Returns:
        The first loss; the final one, a mean of the last ten minibatches, or None where one is not finite; whether it
        diverged; all seconds; and a curve of some fifty points (step, seconds until then, mean of the last ten).
    """
    smooth = [fmean(losses[max(0, k - _LAST) : k]) for k in range(1, len(losses) + 1)]
    every = max(1, len(losses) // _POINTS)
    kept = [k for k in range(1, len(losses) + 1) if k == 1 or k == len(losses) or k % every == 0]
    final = finite(smooth[-1]) if smooth else None
    return {
        "initial": finite(losses[0]) if losses else None,
        "final": final,
        "diverged": bool(losses) and (final is None or final > _DIVERGED * losses[0]),
        "seconds": round(sum(seconds), 4),
        "curve": [[k, round(sum(seconds[:k]), 4), finite(smooth[k - 1])] for k in kept],
    }


def finite(value: float) -> float | None:
    """A number that JSON has, to six digits."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
