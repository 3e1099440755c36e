"""``table``: all runs of one of the paper's tables, as a job list."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from filelock import FileLock, Timeout

from examples.paper.cell import Cell
from examples.paper.commands.budget import Budget
from examples.paper.commands.machine import Machine
from examples.paper.commands.run import MethodName, ProblemName
from examples.paper.defaults import Overrides
from examples.paper.jobs import pending, work_off
from examples.paper.progress import Board
from examples.paper.sources import describe
from examples.paper.tables import TABLES, Table, Values, cells_of, parse_changes
from examples.paper.worker import Job
from workloads import environment

TableName = Literal[tuple(TABLES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class TableRun:
    """Run all cells of a table; started again after it was killed, it goes on where it was.

    Example: python -m examples.paper table table-1 --problems mnist --epochs 20 --seeds 3 --out runs/table-1
    """

    table: tyro.conf.Positional[TableName]
    """Which one. table-2 and table-6 are the searches for best hyperparameters, table-8 the ablation."""
    out: Path
    """Directory: results.jsonl has a line a result, cells/ the logs and checkpoints."""
    problems: tuple[ProblemName, ...] = ()
    """Only these problems."""
    methods: tuple[MethodName, ...] = ()
    """Only these methods."""
    values: Values | None = None
    """Hyperparameters: the paper's best, the whole search grid, or the best found by one (see --found)."""
    found: Path | None = None
    """Take the best values that the search in this directory has found; --values found alone: the search in OUT."""
    change: tuple[str, ...] = ()
    """METHOD.FIELD=VALUE replaces one of these values, but not in a grid; for example kfac.damping=1."""
    seeds: int | None = None
    """Run so many seeds: FIRST_SEED, FIRST_SEED + 1, …; by default 5, and 1 for a grid."""
    first_seed: int = 0
    """The first seed."""
    jobs: int = 1
    """How many cells to run at a time. Seconds are comparable only at 1."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints, which are taken after an epoch."""
    dry_run: bool = False
    """List the cells and stop."""
    budget: Annotated[Budget, tyro.conf.arg(name="")] = Budget()
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()

    def cells(self) -> list[Cell]:
        table: Table = TABLES[self.table]
        table = replace(table, problems=self.problems or table.problems, methods=self.methods or table.methods)
        values = self.values or (table.values if self.found is None else "found")
        seeds = (1 if values == "grid" else 5) if self.seeds is None else self.seeds
        self._check(values, seeds)
        return cells_of(
            table,
            values=values,
            seeds=range(self.first_seed, self.first_seed + seeds),
            budget=self.budget.fields(),
            changes=parse_changes(self.change),
            found=_found(self.found or self.out) if values == "found" else {},
        )

    def _check(self, values: Values, seeds: int) -> None:
        if self.found is not None and values != "found":
            raise ValueError(
                f"--found takes the values of a search and --values {values} others: leave one of them out."
            )
        for option, number in (("--jobs", self.jobs), ("--seeds", seeds)):
            if number < 1:
                raise ValueError(f"{option} {number} runs nothing: it takes 1 or more.")

    def main(self) -> None:
        try:
            cells = self.cells()
        except (KeyError, ValueError) as error:
            raise SystemExit(error.args[0]) from None
        if self.dry_run:
            print("\n".join(f"{cell.key}: {cell.describe()}" for cell in cells))
            return
        self._check_machine(cells)
        self._claim()
        todo = pending(cells, self.out)
        with Board(len(cells), len(cells) - len(todo)) as board:
            failures = work_off(cells, self.out, self._job, self.jobs, board)
        if failures:
            raise SystemExit("\n".join(f"{f.cell.key} failed: {f.error}" for f in failures))
        out, page = shlex.quote(str(self.out)), shlex.quote(str(self.out / "README.md"))
        print(f"{len(cells)} results in {self.out}. Next: python -m examples.paper report {out} --page {page}")

    def _claim(self) -> None:
        """Write down whose results the directory holds, while no other run works in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.out / ".lock", timeout=0):
                describe(self.out, self.table)
        except Timeout:
            raise SystemExit(f"Another run is working in {self.out}.") from None

    def _check_machine(self, cells: Sequence[Cell]) -> None:
        """Fetch or miss data now, or miss a GPU, not in the middle of the night."""
        self.machine.torch_device()
        self.machine.threads_for(self.jobs)
        for problem in dict.fromkeys(cell.problem for cell in cells):
            self.machine.load(problem)

    def _job(self, cell: Cell) -> Job:
        return Job(
            cell=vars(cell),
            directory=str(self.out.resolve()),
            data_root=str(self.machine.data_root.resolve()),
            device=str(self.machine.torch_device()),
            threads=self.machine.threads_for(self.jobs),
            checkpoint_every=self.checkpoint_every,
            command=environment.command("examples.paper"),
            jobs=self.jobs,
        )


def _found(directory: Path) -> dict[tuple[str, str], Overrides]:
    from examples.paper.results import found, load  # with pandas, which takes its time

    values = found(load([directory]))
    if not values:
        raise ValueError(
            f"{directory} has no finished run to take values from: name a search's directory with --found."
        )
    return values
