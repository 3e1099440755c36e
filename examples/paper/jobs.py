"""A list of cells, worked off by processes: it can be killed at any moment and started again.

A cell counts as done once its line is in ``results.jsonl``; until then it goes on from its last checkpoint,
and where its log has an end already, the line is made of that.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from examples.paper.cell import Cell
from examples.paper.sources import finished_keys
from examples.paper.training import Status
from examples.paper.worker import Job

ROOT = Path(__file__).parents[2]  # where `-m examples.paper.worker` can be found


class Display:
    """What a job list tells a display; this one shows nothing."""

    def started(self, cell: Cell) -> None: ...
    def moved(self, cell: Cell, status: Status) -> None: ...
    def ended(self, cell: Cell, error: str | None) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A cell whose worker ended without a result."""

    cell: Cell
    error: str


def pending(cells: Sequence[Cell], directory: Path) -> list[Cell]:
    """The cells without a result, each once."""
    done = finished_keys(directory)
    return list({cell.key: cell for cell in cells if cell.key not in done}.values())


def work_off(
    cells: Sequence[Cell], directory: Path, make_job: Callable[[Cell], Job], jobs: int, display: Display
) -> list[Failure]:
    """Run all cells that have no result, ``jobs`` at a time.

    Raises:
        SystemExit: If another job list works in this directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / ".lock", timeout=0):
            return asyncio.run(_work_off(pending(cells, directory), make_job, jobs, display))
    except Timeout:
        raise SystemExit(f"Another run is working in {directory}.") from None


async def _work_off(
    cells: Sequence[Cell], make_job: Callable[[Cell], Job], jobs: int, display: Display
) -> list[Failure]:
    slots = asyncio.Semaphore(jobs)

    async def one(cell: Cell) -> Failure | None:
        async with slots:
            display.started(cell)
            error = await _work(cell, make_job(cell), display)
            display.ended(cell, error)
            return Failure(cell, error) if error is not None else None

    ends = await asyncio.gather(*(one(cell) for cell in cells))
    return [end for end in ends if end is not None]


async def _work(cell: Cell, job: Job, display: Display) -> str | None:
    """Run one worker; return the end of what it said if it failed."""
    errors = job.log().with_suffix(".stderr")
    errors.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "examples.paper.worker", json.dumps(asdict(job))]
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                display.moved(cell, Status(**json.loads(line)))
            code = await process.wait()
        finally:
            if process.returncode is None:  # we were interrupted
                process.kill()
                await process.wait()
    if code == 0:
        return None
    said = errors.read_text().strip().splitlines()
    return said[-1] if said else f"exit status {code}"
