"""One run on disk: a log of JSON lines, and a checkpoint beside it while it is not finished."""

import io
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.paper import environment, records
from examples.paper.cell import Cell
from examples.paper.data import Data
from examples.paper.training import Diverged, Status, Training, count_parameters

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
    """
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
    if keep_checkpoint:
        _save(training, lines, log)
    else:
        checkpoint_path(log).unlink(missing_ok=True)
    return lines


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


def _header(training: Training) -> dict[str, Any]:
    return {
        "kind": "header",
        "key": training.cell.key,
        "cell": asdict(training.cell),
        "parameters": count_parameters(training.model),
        "training_data": len(training.train),
        "command": environment.command(),
        "environment": environment.describe(training.device),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def checkpoint_path(log: Path) -> Path:
    """Where a run's checkpoint is."""
    return log.with_suffix(".checkpoint")


def _save(training: Training, lines: list[dict[str, Any]], log: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"lines": lines, "training": training.state_dict()}, buffer)
    records.write_atomically(checkpoint_path(log), buffer.getvalue())


def _resume(training: Training, log: Path) -> list[dict[str, Any]]:
    """Load the checkpoint and cut the log back to it; without one, nothing: the run starts again."""
    path = checkpoint_path(log)
    if not path.exists():
        return []
    saved = torch.load(path, map_location="cpu", weights_only=True)
    header, *epochs = [line for line in saved["lines"] if line["kind"] != "end"]
    if not training.cell.continues(Cell(**header["cell"])):
        raise ValueError(f"{path} belongs to another cell: {header['cell']}.")
    training.load_state_dict(saved["training"])
    now = _header(training)
    resumed = [*header.get("resumed", []), {name: now[name] for name in ("command", "environment", "started")}]
    lines = [header | {"key": now["key"], "cell": now["cell"], "resumed": resumed}, *epochs]
    records.replace(log, lines)
    return lines
