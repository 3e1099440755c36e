"""``show``: what there is to run."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from examples.paper import paper_values
from examples.paper.tables import TABLES
from workloads.methods import METHODS
from workloads.problems import PROBLEMS


@dataclass(frozen=True)
class Show:
    """List problems, methods, tables, and the paper's best hyperparameters."""

    def main(self) -> None:
        console = Console()
        console.print(_tables())
        console.print(_problems())
        console.print(_methods())
        console.print(_best("table_2", paper_values.TABLE_2))
        console.print(_best("table_6", paper_values.TABLE_6))


def _tables() -> Table:
    table = Table("table", "what", "hyperparameters", "problems", title="Tables")
    for name, t in TABLES.items():
        table.add_row(name, t.title, t.values, ", ".join(t.problems))
    return table


def _problems() -> Table:
    table = Table("problem", "title", "minibatch", "hyperparameters of", title="Problems")
    for name, p in PROBLEMS.items():
        table.add_row(name, p.title, str(p.batch_size), p.like or "its own")
    return table


def _methods() -> Table:
    table = Table("method", "title", "T", title="Methods")
    for name, method in METHODS.items():
        table.add_row(name, method.title, str(method.update_freq or ""))
    return table


def _best(label: str, best: dict[str, dict[str, paper_values.Best]]) -> Table:
    table = Table("method", *best, title=f"The paper's best α, λ, γ ({label})")
    for name in next(iter(best.values())):
        table.add_row(name, *(_values(row[name]) for row in best.values()))
    return table


def _values(best: paper_values.Best) -> str:
    values = (best.lr, "-" if best.damping is None else best.damping, best.weight_decay or None)
    return ", ".join(str(value) for value in values if value is not None)
