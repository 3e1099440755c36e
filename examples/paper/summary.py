"""Tables of results, as data frames of text."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

import pandas as pd

from examples.paper.cell import Cell
from examples.paper.defaults import differs_from_paper
from examples.paper.results import Result, best_setting, by_setting, lower_is_better
from workloads.methods import METHODS

Published = dict[str, dict[str, float]]
# Of the fields of a cell; KFAC's T is T₂, Adam's damping ε.
SYMBOLS = {"lr": "α", "damping": "λ", "weight_decay": "γ", "stats_update_freq": "T₁", "update_freq": "T"}
_BUDGET = {
    **{"epochs": "epochs", "seconds": "seconds", "steps": "iterations", "decay_every": "decay of α"},
    **{"evaluate_every": "epochs between evaluations", "batch_size": "m", "data_limit": "training data"},
}
_EPOCHS = (1, 2, 4, 8, 14, 20, 30, 40, 60, 80, 100, 150, 200)


def mean_and_error(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± std/√seeds, as in the paper; std is that of a population, as numpy's."""
    series = pd.Series(values, dtype=float)
    if len(series) == 1:
        return f"{series.iloc[0]:.{digits}f}"
    return f"{series.mean():.{digits}f} ± {series.std(ddof=0) / sqrt(len(series)):.{digits}f}"


def hyperparameters(cell: Cell, beside: Iterable[Cell] = ()) -> str:
    """For a cell of a table; with what tells its budget from those of the cells beside it."""
    values = {symbol: getattr(cell, name) for name, symbol in symbols(cell.method).items()}
    parts = [f"{s} {_number(v)}" for s, v in values.items() if v is not None and (s, v) != ("γ", 0.0)]
    return ", ".join([*parts, *_budget(cell, beside)])


def _budget(cell: Cell, beside: Iterable[Cell]) -> list[str]:
    """Those parts of a cell's budget that not all cells beside it have."""
    beside = list(beside)
    names = [name for name in _BUDGET if any(getattr(other, name) != getattr(cell, name) for other in beside)]
    return [f"{_BUDGET[name]} {_value(name, getattr(cell, name))}" for name in names]


def symbols(method: str) -> dict[str, str]:
    """Hyperparameters that a method has: field of a cell ↦ the paper's symbol."""
    own = {"damping": "ε"} if METHODS[method].first_order else {"update_freq": "T₂"} if METHODS[method].is_kfac else {}
    return {name: own.get(name, SYMBOLS[name]) for name in METHODS[method].hyperparameters}


def _value(name: str, value: Any) -> str:
    """Of a field of a cell."""
    if name == "decay_every":
        return f"every {value} epochs" if value else "never"
    if value is None:
        return {"data_limit": "all", "batch_size": "the problem's"}.get(name, "–")
    return _number(value)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _settings(results: Iterable[Result], problem: str) -> dict[str, list[list[Result]]]:
    """The groups of seeds of each method on a problem, in the order of METHODS."""
    groups = by_setting(results)
    return {method: groups[problem, method] for method in METHODS if (problem, method) in groups}


def chosen(results: Iterable[Result], problem: str) -> dict[str, list[Result]]:
    """The seeds of each method's best hyperparameters on a problem, in the order of METHODS."""
    best = {method: best_setting(groups) for method, groups in _settings(results, problem).items()}
    return {method: seeds for method, seeds in best.items() if seeds is not None}


def main_table(results: Sequence[Result], problem: str, published: Published | None) -> pd.DataFrame:
    """One row a method: hyperparameters, the metric at the end and at its best, time, the paper's number."""
    name = "training loss" if lower_is_better(problem) else "validation accuracy, %"
    rows, settings = [], _settings(results, problem)
    for method, seeds in chosen(results, problem).items():
        theirs = (published or {}).get(problem, {}).get(method)
        row = {
            "method": METHODS[method].title,
            "hyperparameters": hyperparameters(seeds[0].cell, _cells(settings[method])),
            "seeds": str(len(seeds)),
            f"{name}, last": mean_and_error([r.value for r in seeds]),
            "best": mean_and_error([r.best for r in seeds]),
            "epochs": _number(round(fmean(r.epochs["epoch"].iloc[-1] for r in seeds), 1)),
            "seconds": mean_and_error([r.end["seconds"] for r in seeds], 0),
            "+ warm start, evaluation": " + ".join(
                f"{fmean(r.end[name] for r in seeds):.0f}" for name in ("warm_start_seconds", "evaluation_seconds")
            ),
        }
        rows.append(row | ({"paper": "" if theirs is None else f"{theirs:.2f}"} if published else {}))
    return pd.DataFrame(rows)


def by_epoch(results: Sequence[Result], problem: str) -> pd.DataFrame:
    """The mean of the metric after some epochs, and at the end."""
    methods = chosen(results, problem)
    ends = {float(seeds[0].epochs["epoch"].iloc[-1]) for seeds in methods.values()}
    rows = []
    for method, seeds in methods.items():
        means = mean_curve(seeds)
        row = {"method": METHODS[method].title}
        for epoch in sorted({*_EPOCHS, *ends}):
            if epoch in means.index and pd.notna(means.loc[epoch, "mean"]):
                row[f"{epoch:g}"] = f"{means.loc[epoch, 'mean']:.2f}"
        rows.append(row)
    frame = pd.DataFrame(rows)
    epochs = [f"{e:g}" for e in sorted({*_EPOCHS, *ends}) if f"{e:g}" in frame]
    return frame[["method", *epochs]].fillna("") if epochs else pd.DataFrame()


def mean_curve(seeds: Sequence[Result], column: str | None = None) -> pd.DataFrame:
    """Mean, standard error and mean seconds by epoch, over the epochs that every seed has."""
    column = column or seeds[0].metric
    rows = pd.concat([r.epochs[["epoch", "seconds", column]] for r in seeds]).dropna()
    groups = rows.groupby("epoch")
    curve = pd.DataFrame(
        {
            "mean": groups[column].mean(),
            "error": groups[column].std(ddof=0) / sqrt(len(seeds)),
            "seconds": groups["seconds"].mean(),
        }
    )
    return curve[groups.size() == len(seeds)]


def to_reach(results: Sequence[Result], problem: str, levels: Sequence[float]) -> pd.DataFrame:
    """Epochs and seconds until the mean over seeds reaches each level."""
    rows = []
    for method, seeds in chosen(results, problem).items():
        curve = mean_curve(seeds)
        row = {"method": METHODS[method].title}
        for level in levels:
            reached = curve[curve["mean"] <= level if lower_is_better(problem) else curve["mean"] >= level]
            row[_number(level)] = f"{reached.index[0]:g} ({reached['seconds'].iloc[0]:.0f} s)" if len(reached) else "–"
        rows.append(row)
    return pd.DataFrame(rows)


def remarks(results: Sequence[Result], problem: str) -> list[str]:
    """Runs that diverged, budgets that the tables leave out, and values that are not the paper's."""
    texts = []
    for method, groups in _settings(results, problem).items():
        texts += _diverged(method, groups) + _budgets(method, groups)
    for method, seeds in chosen(results, problem).items():
        changes = differs_from_paper(seeds[0].cell)
        if changes:
            names = _BUDGET | symbols(method)
            pairs = [f"{names[n]} {_value(n, ours)} for {_value(n, theirs)}" for n, (ours, theirs) in changes.items()]
            texts.append(f"{METHODS[method].title} does not run at the paper's values: {', '.join(pairs)}.")
    return texts


def _cells(groups: Iterable[list[Result]]) -> list[Cell]:
    """One cell of each group of seeds."""
    return [seeds[0].cell for seeds in groups]


def _diverged(method: str, groups: Sequence[list[Result]]) -> list[str]:
    texts = []
    for seeds in groups:
        failed = [r for r in seeds if r.outcome == "diverged"]
        if failed:
            where = ", ".join(f"seed {r.cell.seed}: {r.end['reason']}" for r in failed)
            label = hyperparameters(seeds[0].cell, _cells(groups))
            texts.append(f"{METHODS[method].title} ({label}) diverged: {where}.")
    return texts


def _budgets(method: str, groups: Sequence[list[Result]]) -> list[str]:
    cells = _cells(groups)
    budgets = dict.fromkeys(", ".join(_budget(cell, cells)) for cell in cells)
    if len(budgets) < 2:
        return []
    return [f"{METHODS[method].title} has runs of several budgets ({'; '.join(budgets)}); the tables show the best."]
