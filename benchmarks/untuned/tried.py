"""Ideas beside the defaults, a table each: ``python -m benchmarks.untuned.tried exponent``.

The rows of a study differ in one idea. The first is the default, or what was the default until these studies had shown
a better one: :data:`~benchmarks.untuned.variants.FORMER`. Losses are those of
:mod:`benchmarks.untuned.command`, means over seeds; ∞ is a run that diverged or broke off. The last two columns compare
a row with the first one: the geometric mean of the ratios of losses, and on how many problems it is lower.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks import options
from benchmarks.report import markdown
from benchmarks.untuned import scores, study, variants
from benchmarks.untuned.choice import CHOICE
from benchmarks.untuned.data import Source
from benchmarks.untuned.grids import Cell
from benchmarks.untuned.grouped import GROUPED
from benchmarks.untuned.held_out import HELD_OUT
from benchmarks.untuned.log import Trial
from benchmarks.untuned.protocol import loss
from benchmarks.untuned.report import cost, failures, short
from benchmarks.untuned.training import finite, train
from benchmarks.untuned.variants import Variant, default
from benchmarks.untuned.wide import WIDE
from benchmarks.untuned.working import record
from kfqn_ext.optim import burn_in
from kfqn_ext.optim.inverses import FisherInverse, MovingInverse
from workloads.records import Record

PROBLEMS = {**CHOICE, **GROUPED, **WIDE, "coordinates": HELD_OUT["coordinates"]}
_QUICK_STEPS = 2


@dataclass(frozen=True)
class Study:
    """One question.

    Attributes:
        rows: Variants by what a table calls them; the first is the default.
        problems: Names of those that it is asked on.
        steps: How many.
        valid: Whether validation losses are shown too.
    """

    rows: Mapping[str, Variant]
    problems: Sequence[str] = tuple(CHOICE)
    steps: int = 200
    valid: bool = False


_ONE_PASS = {"one pass": default("onepass")}
_KBFGS = {"K-BFGS": default("kbfgs")}
_KFAC = {"KFAC": default("kfac-untuned")}


def _damped(title: str, name: str) -> dict[str, Variant]:
    """A row with smaller ε."""
    return {f"{title}, ε = {value}": default(name, damping=value) for value in (0.1, 0.03)}


def _learns(*pairs: tuple[int, float]) -> dict[str, Variant]:
    """One pass with other T and ε."""
    return {f"T = k / {growth}, ε = {value}": default("onepass", growth, damping=value) for growth, value in pairs}


def _early(**schedules: Callable[[int], int]) -> dict[str, Variant]:
    """One pass with other T, by how often these learn."""
    counts = {name: sum(k % T(k) == 0 for k in range(1, 101)) for name, T in schedules.items()}
    return {f"{n} of 100, {name}": variants.learning_at(schedules[name]) for name, n in counts.items()}


_AVERAGED = {
    "β = 0.75, 3 random": variants.averaged(0.75, 3),
    "β = 0, none": variants.averaged(0.0, 0),
    "β = 0.75, none": variants.averaged(0.75, 0),
}
_MORE_AVERAGED = {
    "β = 0.75, 1 random": variants.averaged(0.75, 1),
    "β = 0.9, 3 random": variants.averaged(0.9, 3),
}
_A, _G, _ROOT = MovingInverse(), FisherInverse(), variants.FisherRoot()
_COMPUTED = {
    "both learned": variants.computed(),
    "H_G of Γ": variants.computed(output_inverse=_G),
    "H_G of Γ, p = 1/2": variants.computed(output_inverse=_ROOT),
    "H_A of A": variants.computed(input_inverse=_A),
    "both computed": variants.computed(input_inverse=_A, output_inverse=_G),
    "both computed, Γ̂ from Γ̂": variants.computed(input_inverse=_A, output_inverse=variants.FisherFromFirst()),
    "both computed, p = 1/2": variants.computed(input_inverse=_A, output_inverse=_ROOT),
}
_KFAC_COMPUTED = {"KFAC, α = 0.4, ε = 0.1": default("kfac-untuned", 5, lr=0.4, damping=0.1)}

STUDIES = {
    "exponent": Study(
        {
            **_ONE_PASS,
            "exponent 0": variants.exponent(0.0),
            "exponent 1/4": variants.exponent(0.25),
            "exponent 1": variants.exponent(1.0),
            "exponent 1/2 below 1 too": variants.exponent(0.5, 0.0),
        }
    ),
    "warm-up": Study({**_ONE_PASS, "warm-up of 10 %": variants.warm_up(0.1)}),
    "decay": Study(
        {
            **_ONE_PASS,
            "γ = 0.01": default("onepass", weight_decay=0.01),
            "γ = 0.1": default("onepass", weight_decay=0.1),
        },
        valid=True,
    ),
    "groups": Study({**_ONE_PASS, "each group apart": variants.each_group()}, tuple(GROUPED)),
    "reduction": Study(
        {
            **_KBFGS,
            "ε follows": variants.reduction("damping", 1.2, 0.03, 10.0),
            "α follows": variants.reduction("lr", 1 / 1.2, 0.25, 4.0),
        }
    ),
    "normalized": Study({**_KBFGS, "Γ where blind": variants.fisher_where_blind()}, ("vggbn", "resnet", "grouped")),
    "burn-in": Study({**_ONE_PASS, **_learns((10, 0.03), (3, 0.3), (3, 0.1), (3, 0.03), (2, 0.03))}),
    "burn-in-long": Study({**_ONE_PASS, **_learns((3, 0.3), (3, 0.1), (3, 0.03))}, steps=800),
    "damping-long": Study({**_ONE_PASS, **_damped("one pass", "onepass")}, steps=800),
    "damping-kbfgs": Study({**_KBFGS, **_damped("K-BFGS", "kbfgs")}),
    "damping-kfac": Study({**_KFAC, **_damped("KFAC", "kfac-untuned")}),
    "damping-kfac-long": Study({**_KFAC, **_damped("KFAC", "kfac-untuned")}, steps=800),
    "early": Study(
        _early(**{"T = k / 5": burn_in(growth=5)}, **{f"spaced k / {n}": variants.spaced(n) for n in (5, 4, 3, 2)})
    ),
    "averaged": Study({**_AVERAGED, **_MORE_AVERAGED}),
    "averaged-wide": Study(_AVERAGED, ("mlp-8", "ae-28"), steps=120),
    "computed": Study(_COMPUTED),
    "computed-long": Study({row: _COMPUTED[row] for row in ("both learned", "both computed")}, steps=800),
    "computed-early": Study(
        {row: _COMPUTED[row] for row in ("both learned", "both computed", "both computed, Γ̂ from Γ̂")},
        ("ae-28",),
        steps=60,
    ),
    "computed-wide": Study({**_COMPUTED, **_KFAC_COMPUTED}, ("ae-28",), steps=120),
    "small-weights": Study(
        {
            "both learned": variants.computed(),
            **{f"{most} times its size": variants.by_own_size(most) for most in (2.0, 1.0, 0.5, 0.2)},
        },
        (*CHOICE, "coordinates"),
    ),
    "long": Study(
        {
            **_ONE_PASS,
            "ε falls with the rate": variants.falling_damping(1.0),
            "ε = 0.03": default("onepass", damping=0.03),
            "rate × 1/2": default("onepass", lr=0.2),
        },
        ("lenet", "deepmlp", "regression"),
        steps=800,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study.parser(__doc__, "untuned-tried")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args(arguments)
    chosen = STUDIES[args.study]
    steps = _QUICK_STEPS if args.quick else chosen.steps
    trials = [
        Trial(problem, row, variant.setting, steps, seed)
        for seed in args.seeds
        for row, variant in chosen.rows.items()
        for problem in chosen.problems
    ]
    work = study.fixed([PROBLEMS[name] for name in chosen.problems], trials)
    finished = work.mine(study.run(args, work, partial(_one, args.study)))
    results = {
        **study.results(args, "untuned.tried", finished),
        "study": args.study,
        "steps": steps,
        "seeds": args.seeds,
        "valid": chosen.valid,
        "problems": {name: PROBLEMS[name].title for name in chosen.problems},
        "optimizers": {row: row for row in chosen.rows},
        "cells": _cells(finished),
    }
    study.write_beside(args.json, results, "study")
    options.show(args.docs, f"untuned tried {args.study}", render(results))


def _one(name: str, trial: Trial, source: Source) -> Record:
    """Run one trial of a study, which is named as its rows cannot go to another process; say how it went."""
    started, variant = time.perf_counter(), STUDIES[name].rows[trial.optimizer]
    problem, schedule = PROBLEMS[trial.problem], variant.schedule
    found = train(problem, variant.entry, trial.setting, trial.steps, trial.seed, source, schedule)
    return record(trial, source, found, started)


def _cells(finished: Sequence[Record]) -> list[Cell]:
    """One for each row and problem, with losses by seed; None stands for a run that diverged or broke off."""
    cells: dict[tuple[str, str], Cell] = {}
    for run in finished:
        empty = {"problem": run["problem"], "optimizer": run["optimizer"], "losses": [], "valid": [], "error": None}
        cell = cells.setdefault((run["optimizer"], run["problem"]), empty)
        cell["losses"].append(finite(loss(run)))
        cell["valid"].append(run["valid"])
        cell["error"] = cell["error"] or run["error"]
    return list(cells.values())


def render(results: dict[str, Any]) -> str:
    """The tables of a study."""
    blocks = [f"{results['steps']} steps, seeds {', '.join(map(str, results['seeds']))}.", _table(results, "losses")]
    if results["valid"]:
        blocks += ["Loss on validation data at the end.", _table(results, "valid")]
    return "\n\n".join([*blocks, *failures(results), cost(results), f"`{results['command']}`"])


def _table(results: dict[str, Any], what: str) -> str:
    problems = list(results["problems"])
    table = {
        row: {c["problem"]: scores.mean(c[what]) for c in results["cells"] if c["optimizer"] == row}
        for row in results["optimizers"]
    }
    first = next(iter(table.values()))
    rows = [["", *problems, "÷ first", "lower on"]]
    for number, (row, losses) in enumerate(table.items()):
        both = [p for p in problems if p in losses and first.get(p, 0.0) > 0]  # 0 is no unit
        compared = [
            short(_mean_ratio(losses, first, both)),
            f"{sum(losses[p] < first[p] for p in both)} of {len(both)}",
        ]
        cells = [short(losses[p]) if p in losses else "" for p in problems]
        rows.append([row, *cells, *(compared if number else ["", ""])])
    return markdown(rows)


def _mean_ratio(losses: Mapping[str, float], first: Mapping[str, float], problems: Sequence[str]) -> float:
    """Geometric mean; infinite where a run failed, and zero where a loss has come to zero."""
    ratios = [scores.ratio(losses[p], first[p]) for p in problems]
    if not ratios or not all(map(math.isfinite, ratios)):
        return math.inf
    return math.exp(fmean(map(math.log, ratios))) if min(ratios) > 0 else 0.0


if __name__ == "__main__":
    main()
