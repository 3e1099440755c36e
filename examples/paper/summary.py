"""Tables of results, as data frames of text."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

import pandas as pd

from examples.paper.cell import Cell
from examples.paper.defaults import differs_from_paper
from examples.paper.methods import METHODS
from examples.paper.results import Result, best_setting, by_setting, lower_is_better

Published = dict[str, dict[str, float]]
# Of the fields of a cell; KFAC's T is T₂, Adam's damping ε.
SYMBOLS = {"lr": "α", "damping": "λ", "weight_decay": "γ", "stats_update_freq": "T₁", "update_freq": "T"}
_EPOCHS = (1, 2, 4, 8, 14, 20, 30, 40, 60, 80, 100, 150, 200)


def mean_and_error(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± std/√seeds, as in the paper; std is that of a population, as numpy's."""
    series = pd.Series(values, dtype=float)
    if len(series) == 1:
        return f"{series.iloc[0]:.{digits}f}"
    return f"{series.mean():.{digits}f} ± {series.std(ddof=0) / sqrt(len(series)):.{digits}f}"


def hyperparameters(cell: Cell) -> str:
    """For a cell of a table."""
    values = {symbol: getattr(cell, name) for name, symbol in symbols(cell.method).items()}
    return ", ".join(f"{s} {_number(v)}" for s, v in values.items() if v is not None and (s, v) != ("γ", 0.0))


def symbols(method: str) -> dict[str, str]:
    """Hyperparameters that a method has: field of a cell ↦ the paper's symbol."""
    if METHODS[method].samples_targets:
        return {**SYMBOLS, "update_freq": "T₂"}
    if method == "adam":
        return {"lr": "α", "damping": "ε", "weight_decay": "γ"}
    absent = ("stats_update_freq", "update_freq") if METHODS[method].first_order else ("stats_update_freq",)
    return {name: symbol for name, symbol in SYMBOLS.items() if name not in absent}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def chosen(results: Iterable[Result], problem: str) -> dict[str, list[Result]]:
    """The seeds of each method's best hyperparameters on a problem, in the order of METHODS."""
    settings = {method: groups for (p, method), groups in by_setting(results).items() if p == problem}
    best = {method: best_setting(settings[method]) for method in METHODS if method in settings}
    return {method: seeds for method, seeds in best.items() if seeds is not None}


def main_table(results: Sequence[Result], problem: str, published: Published | None) -> pd.DataFrame:
    """One row a method: hyperparameters, the metric at the end and at its best, time, the paper's number."""
    name = "training loss" if lower_is_better(problem) else "validation accuracy, %"
    rows = []
    for method, seeds in chosen(results, problem).items():
        theirs = (published or {}).get(problem, {}).get(method)
        row = {
            "method": METHODS[method].title,
            "hyperparameters": hyperparameters(seeds[0].cell),
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
    """What is not as in the paper: runs that diverged, and hyperparameters that replace its own."""
    texts = []
    for (p, method), settings in by_setting(results).items():
        for seeds in settings if p == problem else ():
            failed = [r for r in seeds if r.outcome == "diverged"]
            if failed:
                where = ", ".join(f"seed {r.cell.seed}: {r.end['reason']}" for r in failed)
                texts.append(f"{METHODS[method].title} ({hyperparameters(seeds[0].cell)}) diverged: {where}.")
    for method, seeds in chosen(results, problem).items():
        changes = differs_from_paper(seeds[0].cell)
        if changes:
            names = symbols(method)
            pairs = [f"{names[n]} {_number(ours)} for {_number(theirs)}" for n, (ours, theirs) in changes.items()]
            texts.append(f"{METHODS[method].title} does not run at the paper's values: {', '.join(pairs)}.")
    return texts
