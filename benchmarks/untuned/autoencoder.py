"""The paper's MNIST autoencoder without tuning: ``python -m benchmarks.untuned.autoencoder``.

Does an optimizer at its own values come as far as K-BFGS does at those that the paper found by a search? Minibatches
have 1000 images. An optimizer's own rate falls to zero as a cosine over all epochs. K-BFGS of the paper has α 0.03 and
λ 0.3, a constant rate, curvature at every step, and starts from the curvature of all data.

Training losses are means over all training images, after each epoch. Seconds are those of the process, in steps and in
that start, with one thread.
"""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from tqdm import trange

from benchmarks import options
from benchmarks.turns import first_line
from benchmarks.untuned import autoencoder_report, study
from benchmarks.untuned.data import Source
from benchmarks.untuned.entry import Entry, Optimizers, closure, of_model, pairs
from benchmarks.untuned.lists import ENTRIES
from benchmarks.untuned.log import Trial
from benchmarks.untuned.problem import SmallProblem, mean_loss, minibatches
from benchmarks.untuned.training import Rate, cosine, descend, finite
from benchmarks.untuned.working import record
from workloads import problems
from workloads.clock import now
from workloads.data import Data
from workloads.methods import METHODS, Settings
from workloads.records import Record

Curve = list[list[float | None]]
_PAPER = "kbfgs-paper"
_EPOCHS, _QUICK_EPOCHS = 40, 2
_IMAGES = {"mnist": 60_000, "digits": 1797}


def _of_paper(model: nn.Module, **setting: float) -> Optimizer:
    return METHODS["kbfgs"].build(model, Settings(**setting))


CHOSEN = {
    "onepass": ENTRIES["onepass"],
    "onepass-kfac": ENTRIES["onepass-kfac"],
    "kbfgs": ENTRIES["kbfgs"],
    "kfac-untuned": ENTRIES["kfac-untuned"],
    _PAPER: Entry("K-BFGS of the paper", of_model(_of_paper), pairs((0.03, 0.3)), closure),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study.parser(__doc__, "untuned-autoencoder", figure=True)
    parser.add_argument("--optimizers", nargs="+", choices=CHOSEN, default=list(CHOSEN), help="which ones")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=_EPOCHS, help="a line of the JSON file for each number of them")
    parser.add_argument("--without-seconds", action="store_true", help="as on a machine that others use too")
    args = parser.parse_args(arguments)
    name, epochs = ("digits", _QUICK_EPOCHS) if args.quick else ("mnist", args.epochs)
    problem = small_problem(name)
    steps = epochs * (_IMAGES[name] // problem.batch_size)
    trials = [Trial(name, each, CHOSEN[each].grid[0], steps, seed) for each in args.optimizers for seed in args.seeds]
    work = study.fixed([problem], trials)
    finished = work.mine(study.run(args, work, one))
    results = {
        **study.results(args, "untuned.autoencoder", finished),
        "epochs": epochs,
        "optimizers": {each: CHOSEN[each].title for each in args.optimizers},
        "cells": [_cell(record, args.without_seconds) for record in finished],
    }
    lines = study.write_beside(args.json, results, "epochs")
    if args.figure is not None:
        autoencoder_report.draw(lines, args.figure)
    options.show(args.docs, "untuned autoencoder", autoencoder_report.render(lines))


def _cell(record: Record, without_seconds: bool) -> dict[str, Any]:
    curve = [[epoch, None if without_seconds else seconds, loss] for epoch, seconds, loss in record["curve"]]
    return {**{key: record[key] for key in ("problem", "optimizer", "seed", "error")}, "curve": curve}


def small_problem(name: str) -> SmallProblem:
    """A problem of the paper's experiments, as those of this benchmark are."""
    p = problems.PROBLEMS[name]
    return SmallProblem(
        p.title, p.build, lambda source: p.load(source.root, True), p.loss.mean, p.batch_size, p.loss.sample
    )


def one(trial: Trial, source: Source) -> Record:
    """Run one trial, and say what it was and how it went."""
    started, curve, error = time.perf_counter(), [], None
    try:
        train(trial, source, curve)
    except Exception as raised:
        error = first_line(raised)
    seconds = curve[-1][1] if curve else 0.0
    return record(trial, source, {"curve": curve, "seconds": seconds, "error": error}, started)


def train(trial: Trial, source: Source, curve: Curve) -> None:
    """Train, and add a point for the network as it is at first and after each epoch: epoch, seconds, training loss."""
    problem, entry = small_problem(trial.problem), CHOSEN[trial.optimizer]
    torch.manual_seed(trial.seed)
    model, data = problem.build(), problem.data(source)
    optimizers = entry.build(model, **trial.setting)
    torch.manual_seed(trial.seed)
    seconds, rate = _start(trial, problem, data, optimizers)
    batches = islice(minibatches(problem, model, data, trial.seed), trial.steps)
    steps, a_time = descend(entry, optimizers, batches, rate), len(data.train) // problem.batch_size
    for epoch in trange(trial.steps // a_time + 1, desc=entry.title, leave=False):
        seconds += sum(spent for _, spent in islice(steps, a_time if epoch else 0))
        loss = finite(mean_loss(problem, model, data.train))
        curve.append([epoch, round(seconds, 3), loss])
        if loss is None:
            return


def _start(trial: Trial, problem: SmallProblem, data: Data, optimizers: Optimizers) -> tuple[float, Rate]:
    """Prepare as the method does: seconds that it took, and how the rate goes on."""
    if trial.optimizer != _PAPER:
        return 0.0, cosine(trial.steps)
    device = torch.device("cpu")
    start = now(device)
    for optimizer in optimizers:
        optimizer.warm_start(data.train.in_order(problem.batch_size), progress=False)
    return now(device) - start, lambda step: 1.0


if __name__ == "__main__":
    main()
