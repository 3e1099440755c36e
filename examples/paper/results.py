"""Results of finished runs, and which of them are the best."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from examples.paper.cell import Cell
from examples.paper.defaults import Overrides
from examples.paper.sources import finished
from workloads.problems import PROBLEMS

_HYPERPARAMETERS = ("lr", "damping", "weight_decay", "update_freq", "stats_update_freq")


@dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
        cell: What was run.
        header: Machine, versions, command, as recorded when it started.
        epochs: One row per epoch; row 0 is the initial network. "seconds" are those of :func:`time_column`.
        outcome: "finished" or "diverged".
        end: The last line of its log, likewise.
    """

    cell: Cell
    header: dict[str, Any]
    epochs: pd.DataFrame
    outcome: str
    end: dict[str, Any]

    @property
    def metric(self) -> str:
        """The column that the paper compares."""
        return metric_of(self.cell.problem)

    @property
    def value(self) -> float:
        """The metric after the last evaluation."""
        return float(self.epochs[self.metric].dropna().iloc[-1])

    @property
    def best(self) -> float:
        """The best value of the metric."""
        column = self.epochs[self.metric]
        return float(column.min() if lower_is_better(self.cell.problem) else column.max())

    @property
    def setting(self) -> Cell:
        """All that decides the result but the seed."""
        return replace(self.cell, seed=0)


def metric_of(problem: str) -> str:
    """The column that the paper compares on a problem."""
    return "train_loss" if lower_is_better(problem) else "valid_accuracy"


def lower_is_better(problem: str) -> bool:
    return PROBLEMS[problem].kind == "autoencoder"


def load(paths: Iterable[Path]) -> list[Result]:
    """Results in what ``table``, ``run`` and ``gather`` wrote; unfinished runs have none.

    Raises:
        ValueError: If a file has no runs.
    """
    return [_result(line) for line in finished(paths)]


def environments(header: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run depended on: where it was begun, and where it was continued."""
    return [part["environment"] for part in (header, *header.get("resumed", ()))]


def time_column(header: dict[str, Any]) -> str:
    """The column of a log that tells the time of training.

    A run in one thread of a CPU tells its process's time, in which what others do on the machine counts little; any
    other, one that was continued in more threads among them, the wall clock's.
    """
    of_process = all(e["device"] == "CPU" and e["threads"] == 1 for e in environments(header))
    return "cpu_seconds" if of_process else "seconds"


def _result(line: dict[str, Any]) -> Result:
    header, column = line["header"], time_column(line["header"])
    epochs = pd.DataFrame([record | {"seconds": record[column]} for record in line["epochs"]]).drop(columns="kind")
    end, cell = line["end"] | {"seconds": line["end"][column]}, Cell(**header["cell"])
    if lower_is_better(cell.problem) and _blew_up(losses := epochs[metric_of(cell.problem)].dropna()):
        end |= {"outcome": "diverged", "reason": f"loss {losses.iloc[-1]:.1e} after epoch {epochs['epoch'].iloc[-1]:g}"}
    return Result(cell, header, epochs, end["outcome"], end)


def _blew_up(losses: pd.Series) -> bool:
    """Whether a loss that stayed finite is lost all the same: it ends far above where it began."""
    return bool(losses.iloc[-1] > 1000 * losses.iloc[0])


def by_setting(results: Iterable[Result]) -> dict[tuple[str, str], list[list[Result]]]:
    """Group by problem and method, and within these by hyperparameters and budget; each group holds the seeds."""
    groups: dict[tuple[str, str], dict[Cell, list[Result]]] = {}
    for result in results:
        settings = groups.setdefault((result.cell.problem, result.cell.method), {})
        settings.setdefault(result.setting, []).append(result)
    return {name: list(settings.values()) for name, settings in groups.items()}


def best_setting(settings: list[list[Result]]) -> list[Result] | None:
    """The seeds of the best setting, of whatever budget, among those where no seed diverged; None where all did."""
    whole = [seeds for seeds in settings if all(r.outcome == "finished" for r in seeds)]
    if not whole:
        return None

    def mean(seeds: list[Result]) -> float:
        value = sum(r.best for r in seeds) / len(seeds)
        return value if lower_is_better(seeds[0].cell.problem) else -value

    return min(whole, key=mean)


def found(results: Iterable[Result]) -> dict[tuple[str, str], Overrides]:
    """Best hyperparameters of each problem and method."""
    values = {}
    for name, settings in by_setting(results).items():
        seeds = best_setting(settings)
        if seeds is not None:
            values[name] = {field: getattr(seeds[0].cell, field) for field in _HYPERPARAMETERS}
    return values
