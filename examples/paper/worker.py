"""The cells of a table, each in a process of its own: ``python -m examples.paper.worker``, started by the job list.

Imports take seconds, so that they are made once: each cell is a fork of a process that has done nothing else.
"""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from filelock import FileLock

from examples.paper.cell import Cell
from examples.paper.run import checkpoint_path, run
from examples.paper.sources import RESULTS, finished_keys, to_line
from examples.paper.training import Status
from workloads import environment, records
from workloads.problems import PROBLEMS

_SECONDS_BETWEEN_REPORTS = 0.3
# What data and optimizers import at first need. The only threads it starts are OpenBLAS's, which mind forks.
_AHEAD = ("sklearn.datasets", "torchvision.datasets", "torch._dynamo")


@dataclass(frozen=True)
class Job:
    """What a worker is told, as JSON.

    Attributes:
        cell: Fields of the cell.
        directory: Where the table's results are.
        data_root: Where the data are.
        device: A torch device.
        threads: Threads of torch.
        checkpoint_every: Seconds between checkpoints.
        command: The command line that the results belong to.
        jobs: How many workers there are at a time.
    """

    cell: dict
    directory: str
    data_root: str
    device: str
    threads: int
    checkpoint_every: float
    command: str
    jobs: int

    def log(self) -> Path:
        return Path(self.directory) / "cells" / f"{Cell(**self.cell).key}.jsonl"

    def errors(self) -> Path:
        return self.log().with_suffix(".stderr")


class Reporter:
    """Writes the status to standard output, where the job list reads it.

    When the job list was killed, writing raises BrokenPipeError and so ends the worker as well.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, status: Status) -> None:
        if status.phase != "train" or time.monotonic() - self._last > _SECONDS_BETWEEN_REPORTS:
            self._last = time.monotonic()
            print(json.dumps(asdict(status)), flush=True)


def work(job: Job) -> None:
    """Run the cell from its last checkpoint on, and append its result; nothing if it has one already.

    Killed after the run and before its result is written, it takes the result from the log the next time.
    """
    environment.prepare(job.threads)
    cell, directory, log = Cell(**job.cell), Path(job.directory), job.log()
    log.parent.mkdir(parents=True, exist_ok=True)
    # A worker whose job list was killed may still be at this cell, for a moment.
    with FileLock(log.with_suffix(".lock")):
        if cell.key in finished_keys(directory):
            return
        lines = records.read(log)
        records.append(directory / RESULTS, to_line(lines if records.ended(lines) else _run(job, cell, log)))
        checkpoint_path(log).unlink(missing_ok=True)  # is there where it was killed right after the last line


def _run(job: Job, cell: Cell, log: Path) -> list[dict[str, Any]]:
    return run(
        cell,
        PROBLEMS[cell.problem].load(Path(job.data_root), False),
        log,
        device=torch.device(job.device),
        resume=True,
        watch=Reporter(),
        checkpoint_every=job.checkpoint_every,
        header={"command": job.command, "jobs": job.jobs},
    )


def serve() -> None:
    """Work on the jobs that come in, a line each; say how each ended, whatever became of it: ``{"exit": status}``."""
    for name in _AHEAD:
        with suppress(ModuleNotFoundError):  # missed where it is used
            import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _work_alone(Job(**json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)


def _work_alone(job: Job) -> NoReturn:
    """Work on a job and end this process at once: taking down all that was imported takes a second."""
    with job.errors().open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        work(job)
    except BaseException:
        traceback.print_exc()  # its last line is what the job list tells
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve()
