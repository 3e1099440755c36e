"""The loss at many pairs of a rate and a damping, as heat maps: ``python -m benchmarks.untuned.heatmaps``.

Two forms have two numbers that act together: the default, with its rate and ε, and the paper's, with α and λ. Each
trains a few of the small problems at all pairs of a grid, for 200 steps and with one seed. Adam trains at each of five
rates, and as torch builds it.

Each form is a figure, with a row for each problem. The left map has the loss after all steps. The right one has what
the same run had reached in the seconds that Adam took for all its steps; its rate was still high by then. A cross is a
run that diverged. Problems, minibatches and losses are those of :mod:`benchmarks.untuned.command`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm

from benchmarks import options
from benchmarks.report import markdown, save
from benchmarks.untuned import study
from benchmarks.untuned.entry import Setting, pairs
from benchmarks.untuned.grids import of
from benchmarks.untuned.lists import ENTRIES, PROBLEMS
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.protocol import BASE, loss
from benchmarks.untuned.report import cost, short
from benchmarks.untuned.scores import at_seconds
from benchmarks.untuned.training import finite
from workloads.lines import WIDTH

Cell = dict[str, Any]
RATES = {"onepass": (0.04, 0.12, 0.4, 1.2, 4.0), "kbfgs-printed": (0.003, 0.01, 0.03, 0.1, 0.3)}
DAMPINGS = {"onepass": (0.03, 0.1, 0.3, 1.0), "kbfgs-printed": (0.03, 0.1, 0.3, 1.0, 3.0)}
SYMBOLS = {"onepass": ("rate", "ε"), "kbfgs-printed": ("α", "λ")}
_PROBLEMS = ("lenet", "deepmlp", "regression", "gpt")
_STEPS, _QUICK_STEPS = 200, 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study.parser(__doc__, "untuned-heatmaps")
    parser.add_argument("--figures", type=Path, help="folder for a figure of each form")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(_PROBLEMS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    steps = _QUICK_STEPS if args.quick else _STEPS
    trials = [
        Trial(problem, name, setting, steps, args.seed)
        for problem in args.problems
        for name, settings in grids().items()
        for setting in settings
    ]
    work = study.fixed([PROBLEMS[name] for name in args.problems], trials)
    found = study.run(args, work)
    results = {
        **study.results(args, "untuned.heatmaps", work.mine(found)),
        "steps": steps,
        "seed": args.seed,
        "problems": {name: PROBLEMS[name].title for name in args.problems},
        "optimizers": {name: ENTRIES[name].title for name in grids()},
        "own": {key: ENTRIES["onepass"].defaults()[key] for key in ("lr", "damping")},
        "cells": cells(trials, found),
    }
    options.write(args.json, results)
    for name in RATES if args.figures is not None else ():
        draw(results, name, args.figures / f"{name}.png")
    options.show(args.docs, "untuned heatmaps", render(results))


def grids() -> dict[str, Sequence[Setting]]:
    """All settings of each optimizer; Adam's last is none, which leaves torch's own."""
    forms = {name: pairs(*((lr, damping) for damping in DAMPINGS[name] for lr in RATES[name])) for name in RATES}
    return {**forms, BASE: [*ENTRIES[BASE].grid, {}]}


def cells(trials: Sequence[Trial], found: Found) -> list[Cell]:
    """A JSON object for each run: its loss at the end, and by the seconds of Adam as torch builds it.

    A loss is None where the run diverged or broke off.
    """
    budgets = {t.problem: found[t.key]["seconds"] for t in trials if t.optimizer == BASE and not t.setting}
    return [
        {
            "problem": trial.problem,
            "optimizer": trial.optimizer,
            "setting": dict(trial.setting),
            "loss": finite(loss(found[trial.key])),
            "at_seconds": at_seconds(found[trial.key], budgets[trial.problem]),
            "seconds": found[trial.key]["seconds"],
        }
        for trial in trials
    ]


# ------------------------------------------------------------------ the table


def render(results: dict[str, Any]) -> str:
    """A row for each problem and form: how many runs failed, and how much its default and its best pair reach."""
    rows = [["", "failed", "best pair", "its loss", "loss of the default", "Adam's best of five rates", "Adam's own"]]
    for problem in results["problems"]:
        mine = of(results["cells"], problem=problem)
        tuned = min(map(_value, of(mine, optimizer=BASE)))
        (own,) = of(mine, optimizer=BASE, setting={})
        for name in RATES:
            form = of(mine, optimizer=name)
            rows.append([*_row(results, name, problem, form), short(tuned), short(_value(own))])
    return "\n\n".join([markdown(rows), cost(results), f"`{results['command']}`"])


def _row(results: dict[str, Any], name: str, problem: str, form: Sequence[Cell]) -> list[str]:
    best = min(form, key=_value)
    default = of(form, optimizer="onepass", setting=results["own"])  # "as printed" has no values of its own
    return [
        f"{problem}, {results['optimizers'][name]}",
        f"{sum(cell['loss'] is None for cell in form)} of {len(form)}",
        ", ".join(f"{value:g}" for value in best["setting"].values()),
        short(_value(best)),
        short(_value(default[0])) if default else "–",
    ]


def _value(cell: Cell) -> float:
    return math.inf if cell["loss"] is None else cell["loss"]


# ------------------------------------------------------------------ the figures


def draw(results: dict[str, Any], name: str, path: Path) -> None:
    """A row for each problem: the loss by step, and by the seconds of Adam."""
    problems = results["problems"]
    size = (WIDTH, 0.6 + 1.7 * len(problems))
    figure, axes = plt.subplots(
        len(problems), 2, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for row, problem in zip(axes, problems, strict=True):
        mine = of(results["cells"], problem=problem)
        values = [cell["loss"] for cell in of(mine, optimizer=name) if cell["loss"]]
        norm = LogNorm(min(values), max(values), clip=True)
        for ax, key in zip(row, ("loss", "at_seconds"), strict=True):
            _draw_map(ax, of(mine, optimizer=name), key, name, norm)
        row[0].set_title(f"{problem}: loss after {results['steps']} steps", fontsize=9)
        row[1].set_title("loss in the seconds of Adam's steps", fontsize=9)
        row[0].set_ylabel(SYMBOLS[name][1], fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel(SYMBOLS[name][0], fontsize=9)
    save(figure, path)


def _draw_map(ax: Any, form: Sequence[Cell], key: str, name: str, norm: LogNorm) -> None:
    """Dark is low. The number stands in each cell, or a cross where the run diverged."""
    rates, dampings = RATES[name], DAMPINGS[name]
    by_setting = {(cell["setting"]["lr"], cell["setting"]["damping"]): cell[key] for cell in form}
    table = [[by_setting[lr, damping] for lr in rates] for damping in dampings]
    image = [[math.nan if value is None else value for value in row] for row in table]
    ax.imshow(image, norm=norm, cmap="Greys_r", aspect="auto", origin="lower")
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            _write(ax, j, i, value, norm)
    ax.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates], fontsize=8)
    ax.set_yticks(range(len(dampings)), [f"{value:g}" for value in dampings], fontsize=8)


def _write(ax: Any, x: int, y: int, value: float | None, norm: LogNorm) -> None:
    if value is None:
        ax.text(x, y, "×", ha="center", va="center", fontsize=13, color="black")
        return
    color = "white" if float(norm(value)) < 0.5 else "black"
    ax.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=8, color=color)


if __name__ == "__main__":
    main()
