"""Trials, and the file of those that are finished: a line of JSON each. It can be cut off anywhere and written on."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from benchmarks.untuned.entry import Setting
from workloads import records
from workloads.records import Record

Found = dict[str, Record]


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        problem: Name of the problem.
        optimizer: Name of the optimizer.
        setting: What its ``build`` is called with.
        steps: How many.
        seed: Of the network's parameters and of the minibatches.
    """

    problem: str
    optimizer: str
    setting: Setting
    steps: int
    seed: int

    @property
    def key(self) -> str:
        """What the run is found by."""
        return json.dumps([self.problem, self.optimizer, self.setting, self.steps, self.seed], sort_keys=True)


def read(paths: Iterable[Path], quick: bool) -> Found:
    """Finished runs by key, of quick networks or of the others; a line that was cut off is no run."""
    found: Found = {}
    for record in (record for path in paths for record in records.read(path)):
        trial = Trial(*(record[name] for name in ("problem", "optimizer", "setting", "steps", "seed")))
        if record["quick"] == quick:
            found[trial.key] = record
    return found


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep others from writing to a file.

    Raises:
        SystemExit: If somebody else does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{path}.lock", timeout=0):
            yield
    except Timeout:
        raise SystemExit(f"Another run is writing to {path}.") from None
