"""How the paper ran its experiments: what a cell is where the command line says nothing else."""

from dataclasses import dataclass
from typing import Any

from examples.paper import paper_values
from examples.paper.cell import Cell
from workloads.methods import METHODS
from workloads.problems import PROBLEMS


@dataclass(frozen=True)
class PaperBudget:
    """When a run ends, with whichever comes first, and how its learning rate decays."""

    epochs: int | None = None
    seconds: float | None = None
    decay_every: int = 0


# Sections "Comparison with Goldfarb et al. (2020)", sec_17, and "CNNs: Generalization Performance".
_AUTOENCODER_SECONDS = {"mnist": 500.0, "faces": 2000.0, "curves": 500.0}
_CNN_FIRST_ORDER = PaperBudget(epochs=200, decay_every=60)
_CNN_SECOND_ORDER = PaperBudget(epochs=150, decay_every=50)
_CNN_KFAC = {"update_freq": 100, "stats_update_freq": 10}
_CNN_UPDATE_FREQ = 20

Overrides = dict[str, Any]


def budget(problem: str, method: str) -> PaperBudget:
    """The paper's budget."""
    if PROBLEMS[problem].kind == "cnn":
        return _CNN_FIRST_ORDER if METHODS[method].first_order else _CNN_SECOND_ORDER
    return PaperBudget(seconds=_AUTOENCODER_SECONDS[PROBLEMS[problem].like or problem])


def frequencies(problem: str, method: str) -> dict[str, int | None]:
    """The paper's T, T₁, T₂; nothing for a method without."""
    if METHODS[method].first_order:
        return {}
    if PROBLEMS[problem].kind == "cnn":
        return dict(_CNN_KFAC) if METHODS[method].is_kfac else {"update_freq": _CNN_UPDATE_FREQ}
    return {"update_freq": METHODS[method].update_freq}


def best(problem: str, method: str) -> Overrides:
    """The paper's best hyperparameters, of the problem or the one it is like.

    Raises:
        KeyError: If the paper has none.
    """
    name = PROBLEMS[problem].like or problem
    row = paper_values.BEST[name]
    if method not in row:
        raise KeyError(f"The paper gives no hyperparameters of {method} on {name}.")
    return {name: value for name, value in vars(row[method]).items() if value is not None}


def make_cell(problem: str, method: str, values: Overrides) -> Cell:
    """Build a cell from ``values`` (None counts as not given), and the paper's settings for the rest.

    Args:
        problem: Name of the problem.
        method: Name of the method.
        values: Fields of :class:`Cell`. A budget replaces the paper's, and leaves the decay of the learning rate.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if not METHODS[method].has_damping:
        given.pop("damping", None)
    if METHODS[method].first_order:
        given.pop("update_freq", None)
    theirs = budget(problem, method)
    cell: Overrides = {**frequencies(problem, method), "decay_every": theirs.decay_every}
    if not {"epochs", "seconds", "steps"} & given.keys():
        cell |= vars(theirs)
    return Cell(problem=problem, method=method, **(cell | given))


def paper_cell(problem: str, method: str, **values: Any) -> Cell:
    """The paper's best cell, except for ``values``."""
    return make_cell(problem, method, best(problem, method) | values)


def differs_from_paper(cell: Cell) -> dict[str, tuple[Any, Any]]:
    """What is not the paper's, of hyperparameters and of what a run sees of its data: name ↦ (ours, the paper's).

    How long a run lasts is not compared.
    """
    problem, names = PROBLEMS[cell.problem], METHODS[cell.method].hyperparameters
    ours = vars(cell) | {"batch_size": cell.batch_size or problem.batch_size}
    decay = budget(cell.problem, cell.method).decay_every
    theirs = {"decay_every": decay, "batch_size": problem.batch_size, "data_limit": None}
    try:
        paper = vars(paper_cell(cell.problem, cell.method))
    except KeyError:
        paper = {}
    theirs = {name: paper[name] for name in names if name in paper} | theirs
    return {name: (ours[name], value) for name, value in theirs.items() if ours[name] != value}
