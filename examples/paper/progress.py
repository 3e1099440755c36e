"""What a person sees while runs are running."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from examples.paper.cell import Cell
from examples.paper.jobs import Display
from examples.paper.training import Status
from workloads.methods import METHODS


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=4)


class _Live:
    def __init__(self) -> None:
        self.progress = _progress()

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def _show(self, task: TaskID, cell: Cell, status: Status) -> None:
        state = f"{status.phase}, epoch {status.epoch}, iteration {status.step}, loss {status.loss:.4g}"
        self.progress.update(task, total=1.0, completed=fraction_done(cell, status), state=state)


class Bar(_Live):
    """One run: epoch, iteration, loss, time left."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self._cell = cell
        self._task = self.progress.add_task(METHODS[cell.method].title, state="", total=None)

    def __call__(self, status: Status) -> None:
        self._show(self._task, self._cell, status)


class Board(_Live, Display):
    """A job list: one line for each running cell, one for all of them, and one printed for each that ends."""

    def __init__(self, cells: int, done: int) -> None:
        super().__init__()
        self._tasks: dict[str, TaskID] = {}
        self._all = self.progress.add_task("all cells", total=cells, completed=done, state=f"{done} were done")

    def started(self, cell: Cell) -> None:
        title = f"{cell.problem} {METHODS[cell.method].title} ({cell.describe()})"
        self._tasks[cell.key] = self.progress.add_task(title, state="starting", total=None)

    def moved(self, cell: Cell, status: Status) -> None:
        self._show(self._tasks[cell.key], cell, status)

    def ended(self, cell: Cell, error: str | None) -> None:
        self.progress.remove_task(self._tasks.pop(cell.key))
        self.progress.advance(self._all)
        self.progress.update(self._all, state="")
        # Text, for an error may well have brackets, which markup would take for its own.
        how = "done" if error is None else Text.assemble(("failed", "red"), ": ", error)
        self.progress.console.print(Text.assemble(f"{cell.key}: ", how))


def fraction_done(cell: Cell, status: Status) -> float:
    """How much of a run is done: the largest fraction of a budget, for the first that is used up ends it."""
    epochs = None if cell.epochs is None else cell.epochs * status.steps_per_epoch
    used = ((status.step, epochs), (status.step, cell.steps), (status.seconds, cell.seconds))
    return max(min(1.0, now / end) if end else 1.0 for now, end in used if end is not None)


def sentence(lines: list[dict[str, Any]]) -> str:
    """How a run ended, for a person."""
    end, last = lines[-1], [line for line in lines if line["kind"] == "epoch"][-1]
    measured = ("minibatch_loss", "train_loss", "valid_loss", "valid_accuracy")
    values = [f"{name.replace('_', ' ')} {last[name]:.4f}" for name in measured if last.get(name) is not None]
    parts = [end["outcome"] + (f" ({end['reason']})" if "reason" in end else ""), f"epoch {last['epoch']}", *values]
    parts += [f"{end[name]:.1f} s {label}" for name, label in _CLOCKS]
    return ", ".join(parts)


_CLOCKS = (("seconds", "of training"), ("warm_start_seconds", "of warm start"), ("evaluation_seconds", "of evaluation"))
