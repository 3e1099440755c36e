"""The paper's tables as lists of cells."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from examples.paper import paper_values
from examples.paper.cell import Cell
from examples.paper.defaults import Overrides, best, make_cell
from workloads.methods import METHODS
from workloads.problems import PROBLEMS

Values = Literal["paper", "grid", "found"]

_AUTOENCODERS = ("mnist", "faces", "curves")
_CNNS = ("vgg16-cifar10", "resnet32-cifar10", "vgg16-cifar100", "resnet32-cifar100")
_ABLATION = ("kbfgs", "kbfgs-no-dpdlm", "kbfgs-moving-a", "kbfgs20")
_SMALL_METHODS = ("kbfgs", "adam", "sgdm")


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows.
        problems: Its problems.
        methods: Its methods.
        values: Hyperparameters: the paper's best, or all of a search range.
        published: The paper's results, by problem and method.
    """

    title: str
    problems: tuple[str, ...]
    methods: tuple[str, ...]
    values: Values = "paper"
    published: dict[str, dict[str, float]] | None = None


_AUTOENCODER_METHODS = tuple(paper_values.TABLE_2["mnist"])[:8]
_CNN_METHODS = tuple(paper_values.TABLE_6["vgg16-cifar10"])[:5]

TABLES: dict[str, Table] = {
    "table-1": Table(
        "Training loss of the autoencoders", _AUTOENCODERS, _AUTOENCODER_METHODS, published=paper_values.TABLE_1
    ),
    "table-2": Table(
        "Best hyperparameters of the autoencoders", _AUTOENCODERS, _AUTOENCODER_METHODS, "grid", paper_values.TABLE_1
    ),
    "table-6": Table("Best hyperparameters of the CNNs", _CNNS, _CNN_METHODS, "grid", paper_values.TABLE_7),
    "table-7": Table("Validation accuracy of the CNNs", _CNNS, _CNN_METHODS, published=paper_values.TABLE_7),
    "table-8": Table("Ablation of the two improvements", _AUTOENCODERS, _ABLATION, published=paper_values.TABLE_8),
    # Not the paper's:
    "curves-generated": Table("Training loss on generated curves", ("curves-generated",), _AUTOENCODER_METHODS),
    "cnn-small": Table("Small CNNs on MNIST", ("vgg8-mnist", "resnet20-mnist"), _SMALL_METHODS, "grid"),
    "digits": Table("Training loss on digits: for a first try", ("digits",), _AUTOENCODER_METHODS),
}

# The neighbourhood of table_6: there α/λ of K-BFGS is 0.003 to 0.1, and αγ of every method about 3e-4 to 1e-3.
_SMALL_GRID: dict[str, list[Overrides]] = {
    "kbfgs": [
        {"lr": ratio * damping, "damping": damping, "weight_decay": 5e-4 / (ratio * damping)}
        for ratio, damping in itertools.product((0.01, 0.03, 0.1), (10.0, 100.0, 1000.0))
    ],
    "kbfgsl": [
        {"lr": ratio * damping, "damping": damping, "weight_decay": 5e-4 / (ratio * damping)}
        for ratio, damping in itertools.product((0.01, 0.03, 0.1), (10.0, 100.0, 1000.0))
    ],
    "kfac": [
        {"lr": lr, "damping": damping, "weight_decay": 5e-4 / lr}
        for lr, damping in itertools.product((0.003, 0.01, 0.03), (0.01, 0.1, 1.0))
    ],
    "adam": [
        {"lr": lr, "damping": eps, "weight_decay": 5e-4 / lr}
        for lr, eps in itertools.product((0.0003, 0.001, 0.003, 0.01), (1e-8, 1e-4, 0.01, 0.1))
    ],
    "sgdm": [{"lr": lr, "weight_decay": 5e-4 / lr} for lr in (0.003, 0.01, 0.03, 0.1, 0.3)],
}


def grid(problem: str, method: str) -> list[Overrides]:
    """The search range of a method on a problem, one entry a cell."""
    is_cnn = PROBLEMS[problem].kind == "cnn"
    small = is_cnn and PROBLEMS[problem].like is not None
    grids = _SMALL_GRID if small else paper_values.CNN_GRID if is_cnn else paper_values.AUTOENCODER_GRID
    if method not in grids:
        whose = "There is" if small else "The paper has"
        raise KeyError(f"{whose} no search range for {method} on {problem}; there is one for {', '.join(grids)}.")
    if small:
        return _SMALL_GRID[method]
    ranges = grids[method]
    return [dict(zip(ranges, values, strict=True)) for values in itertools.product(*ranges.values())]


def cells_of(
    table: Table,
    *,
    values: Values,
    seeds: Sequence[int],
    budget: Overrides,
    changes: dict[str, Overrides],
    found: dict[tuple[str, str], Overrides],
) -> list[Cell]:
    """All cells of a table, the seeds outermost: an early stop leaves whole tables of fewer seeds.

    Args:
        table: The table.
        values: Which hyperparameters.
        seeds: The seeds.
        budget: Fields of :class:`Cell` for all cells.
        changes: Fields of :class:`Cell` by method, which replace the paper's values, or those found.
        found: Best hyperparameters found by a search, by problem and method.

    Raises:
        ValueError: If a change would change nothing.
        KeyError: If there are no hyperparameters of a method on a problem.
    """
    if changes and values == "grid":
        raise ValueError(
            "--change replaces single values, and a grid has them all: add --values paper, or leave it out."
        )
    absent = [method for method in changes if method not in table.methods]
    if absent:
        raise ValueError(f"--change names {', '.join(absent)}, but the methods are {', '.join(table.methods)}.")
    cells = []
    for seed, problem, method in itertools.product(seeds, table.problems, table.methods):
        for hyperparameters in _hyperparameters(problem, method, values, changes.get(method, {}), found):
            cells.append(make_cell(problem, method, hyperparameters | budget | {"seed": seed}))
    return cells


def _hyperparameters(
    problem: str, method: str, values: Values, change: Overrides, found: dict[tuple[str, str], Overrides]
) -> list[Overrides]:
    if values == "grid":
        return grid(problem, method)
    if values == "found":
        if (problem, method) not in found:
            raise KeyError(
                f"The search has no finished run of {method} on {problem}: search there too, or name what to run with "
                "--problems and --methods."
            )
        return [found[problem, method] | change]
    return [best(problem, method) | change]


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _frequency(text: str) -> int | str:
    return text if text in ("geometric", "early") else _count(text)


_FIELDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "lr": (float, "a number"),
    "damping": (float, "a number"),
    "weight_decay": (float, "a number"),
    "stats_update_freq": (_count, "a number of iterations, 1 or more"),
    "update_freq": (_frequency, "a number of iterations, 1 or more, or geometric, or early"),
}


def parse_changes(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read ``METHOD.FIELD=VALUE``, for example ``kfac.damping=1`` or ``kfac.update_freq=geometric``.

    Raises:
        ValueError: If one is not of this form, or the method has no such hyperparameter.
    """
    changes: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        method, _, field = name.partition(".")
        if method not in METHODS or field not in _FIELDS or not value:
            raise ValueError(f"--change {text}: not METHOD.FIELD=VALUE with a FIELD of {', '.join(_FIELDS)}.")
        if field not in METHODS[method].hyperparameters:
            has = ", ".join(METHODS[method].hyperparameters)
            raise ValueError(f"--change {text}: {method} has no {field}; it has {has}.")
        read, takes = _FIELDS[field]
        try:
            changes.setdefault(method, {})[field] = read(value)
        except ValueError:
            raise ValueError(f"--change {text}: {field} takes {takes}, not {value!r}.") from None
    return changes
