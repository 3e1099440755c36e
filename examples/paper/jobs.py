"""A list of cells, worked off by processes: it can be killed at any moment and started again.

A cell counts as done once its line is in ``results.jsonl``; until then it goes on from its last checkpoint,
and where its log has an end already, the line is made of that.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

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
    waiting, failures = list(reversed(cells)), []

    async def work() -> None:
        while waiting:  # again where a worker was lost
            async with _worker() as worker:
                while waiting and worker.is_alive:
                    cell = waiting.pop()
                    display.started(cell)
                    error = await worker.work(make_job(cell), lambda status, cell=cell: display.moved(cell, status))
                    display.ended(cell, error)
                    if error is not None:
                        failures.append(Failure(cell, error))

    await asyncio.gather(*(work() for _ in range(min(jobs, len(cells)))))
    return failures


class _Worker:
    """A process that works on one job after the other."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> None:
        self._process, self._stderr, self.is_alive = process, stderr, True

    async def work(self, job: Job, moved: Callable[[Status], None]) -> str | None:
        """Hand over one job; return the end of what it said if it failed."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        job.errors().parent.mkdir(parents=True, exist_ok=True)
        with suppress(ConnectionError):  # it was lost: the end of its output says so
            process.stdin.write(f"{json.dumps(asdict(job))}\n".encode())
            await process.stdin.drain()
        async for line in process.stdout:
            said = json.loads(line)
            if "exit" not in said:
                moved(Status(**said))
            elif said["exit"] == 0:
                return None
            else:
                return _end_of(job.errors().read_text(), said["exit"])
        self.is_alive = False
        self._stderr.seek(0)
        return _end_of(self._stderr.read().decode(), await process.wait())


def _end_of(stderr: str, code: int) -> str:
    said = stderr.strip().splitlines()
    return said[-1] if said else f"exit status {code}"


@asynccontextmanager
async def _worker() -> AsyncIterator[_Worker]:
    command, pipe = [sys.executable, "-m", "examples.paper.worker"], asyncio.subprocess.PIPE
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=stderr, cwd=ROOT, start_new_session=True
        )
        try:
            yield _Worker(process, stderr)
            process.stdin.close()  # no more jobs
            await process.wait()
        finally:
            if process.returncode is None:  # we were interrupted
                os.killpg(process.pid, signal.SIGKILL)  # the cell that it works on as well
                await process.wait()
