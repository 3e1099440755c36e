"""One run on disk: a log of JSON lines, and a checkpoint beside it while it is not finished."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from examples.paper.cell import Cell
from examples.paper.training import Diverged, Status, Training, count_parameters
from workloads import environment, records
from workloads.data import Data

Watch = Callable[[Status], None]


def run(
    cell: Cell,
    data: Data,
    log: Path,
    *,
    device: torch.device,
    resume: bool,
    watch: Watch,
    checkpoint_every: float = 60.0,
    keep_checkpoint: bool = False,
    header: dict[str, Any] | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> list[dict[str, Any]]:
    """Train a cell to the end of its budget.

    Args:
        cell: The cell.
        data: Its data.
        log: File of JSON lines: a header, one line an epoch, a line that says how it ended.
        device: Where to train.
        resume: Go on from the checkpoint beside the log, if there is one.
        watch: Called often, for displays.
        checkpoint_every: Seconds between checkpoints, which are only taken after an epoch.
        keep_checkpoint: Leave a checkpoint of the end, from which a longer run can go on.
        header: Further entries of the header; ``command`` is by default this process's.
        on_record: Called with each line.

    Returns:
        All lines of the log.

    Raises:
        Refused: If another run writes to this log, or there is nothing to resume from.
    """
    with _alone_with(log):
        training = Training(cell, data, device)
        lines = _resume(training, log) if resume else []

        def add(record: dict[str, Any]) -> None:
            lines.append(record)
            records.append(log, record)
            on_record(record)

        if not lines:
            records.replace(log, [])
            add(_header(training) | (header or {}))
            add({"kind": "epoch", **training.start(watch)})
        _train(training, add, watch, lambda: _save(training, lines, log), checkpoint_every)
        _leave(training, lines, log, keep_checkpoint)
        return lines


@contextmanager
def _alone_with(log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(log.with_name(f"{log.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise records.Refused(
            f"Another run is writing to {log}, and lines of two runs in one log can't be told apart. Wait for its end, "
            "or give another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _train(
    training: Training, add: Callable[[dict[str, Any]], None], watch: Watch, save: Callable[[], None], every: float
) -> None:
    outcome, saved = {"outcome": "finished"}, time.monotonic()
    while not training.done:
        try:
            add({"kind": "epoch", **training.train_epoch(watch)})
        except Diverged as reason:
            outcome = {"outcome": "diverged", "reason": str(reason)}
            break
        if time.monotonic() - saved >= every:
            save()
            saved = time.monotonic()
    add({"kind": "end", **outcome, "iteration": training.step, **training.clock.record()})


def _leave(training: Training, lines: list[dict[str, Any]], log: Path, keep_checkpoint: bool) -> None:
    if not keep_checkpoint:
        checkpoint_path(log).unlink(missing_ok=True)
    elif lines[-1]["outcome"] == "finished":  # nothing can go on from what diverged
        _save(training, lines, log)


def _header(training: Training) -> dict[str, Any]:
    return {
        "kind": "header",
        "key": training.cell.key,
        "cell": asdict(training.cell),
        "parameters": count_parameters(training.model),
        "training_data": len(training.train),
        **environment.origin("examples.paper", training.device),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def checkpoint_path(log: Path) -> Path:
    """Where a run's checkpoint is."""
    return log.with_name(f"{log.name}.checkpoint")


def _save(training: Training, lines: list[dict[str, Any]], log: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"lines": lines, "training": training.state_dict()}, buffer)
    records.write_atomically(checkpoint_path(log), buffer.getvalue())


def _resume(training: Training, log: Path) -> list[dict[str, Any]]:
    """Load the checkpoint and cut the log back to it; without one, nothing: the run starts again."""
    path = checkpoint_path(log)
    if not path.exists():
        _refuse_if_finished(log)
        return []
    saved = torch.load(path, map_location="cpu", weights_only=True)
    header, *rest = saved["lines"]
    begun = Cell(**header["cell"])
    _refuse_another_cell(training.cell, begun, path)
    training.load_state_dict(saved["training"])
    if training.done and training.cell != begun:
        raise records.Refused(
            f"{path} is of iteration {training.step}, after {training.clock.wall['train']:.1f} s, where the budget of "
            "this run is used up. Give a larger budget, or another --out."
        )
    # The line of an epoch that a budget cut short makes room for that of the whole epoch.
    last = training.step if training.done else training.last_full_epoch
    epochs = [line for line in rest if line["kind"] == "epoch" and line["iteration"] <= last]
    now = _header(training)
    resumed = [*header.get("resumed", []), {name: now[name] for name in ("command", "environment", "started")}]
    lines = [header | {"key": now["key"], "cell": now["cell"], "resumed": resumed}, *epochs]
    records.replace(log, lines)
    return lines


def _refuse_if_finished(log: Path) -> None:
    if records.ended(records.read(log)):
        raise records.Refused(
            f"{log} is the log of a finished run without a checkpoint, so there is nothing to go on from, and to start "
            "again would delete it. Give another --out, with --keep-checkpoint if that run is to become longer later."
        )


def _refuse_another_cell(cell: Cell, other: Cell, path: Path) -> None:
    differences = other.differences(cell)
    if differences:
        raise records.Refused(
            f"{path} belongs to another cell ({', '.join(differences)}), and a run goes on with all that it was begun "
            "with but its budget. Give the same values, or another --out."
        )
