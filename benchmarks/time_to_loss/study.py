"""Which runs there are, in which order, and what is made of them."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.time_to_loss.grids import OPTIMIZERS, grid
from benchmarks.time_to_loss.problems import RACES
from benchmarks.time_to_loss.race import Heat, final, reached
from benchmarks.untuned.entry import Setting
from benchmarks.untuned.training import finite

Record = dict[str, Any]
Found = dict[str, Record]
_QUICK_SHARE = 0.02
_NAMES = tuple(Heat.__dataclass_fields__)


def key(run: Heat | Record) -> str:
    """What a run is found by."""
    values = asdict(run) if isinstance(run, Heat) else {name: run[name] for name in _NAMES}
    return json.dumps(values, sort_keys=True)


@dataclass(frozen=True)
class RaceStudy:
    """Problems and optimizers, each with each.

    Attributes:
        problems: Their names.
        optimizers: Their names.
        seeds: The first one is tuned on.
        quick: On digits, in few seconds.
    """

    problems: Sequence[str]
    optimizers: Sequence[str]
    seeds: Sequence[int]
    quick: bool

    @property
    def number(self) -> int:
        """How many runs there are."""
        return len(list(self.runs({})))

    def runs(self, found: Found) -> Iterator[Heat]:
        """All runs, round by round: the grids with the first seed, then the best of each with the others.

        The best are chosen when they are asked for, from what is found by then.
        """
        pairs = [(problem, optimizer) for problem in self.problems for optimizer in self.optimizers]
        random.Random(0).shuffle(pairs)
        for place in range(max(len(grid(*pair)) for pair in pairs)):
            for pair in pairs:
                for setting in grid(*pair)[place : place + 1]:
                    yield self._run(*pair, setting, self.seeds[0])
        for seed in self.seeds[1:]:
            for pair in pairs:
                yield self._run(*pair, self.best(*pair, found), seed)

    def best(self, problem: str, optimizer: str, found: Found) -> Setting:
        """The setting of a grid with the lowest last loss of the first seed."""

        def loss(setting: Setting) -> float:
            record = found.get(key(self._run(problem, optimizer, setting, self.seeds[0])))
            return float("inf") if record is None else final(record)

        return min(grid(problem, optimizer), key=loss)

    def results(self, found: Found) -> dict[str, Any]:
        """By problem and optimizer: the setting, and of each seed seconds to losses, the last loss, and steps."""
        return {
            "quick": self.quick,
            "wall": sum(found[key(run)]["wall"] for run in self.runs(found) if key(run) in found),
            "problems": {problem: self._problem(problem, found) for problem in self.problems},
        }

    def _problem(self, problem: str, found: Found) -> dict[str, Any]:
        race = RACES[problem]
        rows = {}
        for optimizer in self.optimizers:
            settings, best = grid(problem, optimizer), self.best(problem, optimizer, found)
            records = [found.get(key(self._run(problem, optimizer, best, seed))) for seed in self.seeds]
            rows[OPTIMIZERS[optimizer].title] = {
                "setting": best,
                "at an end": len(settings) > 1 and best in (settings[0], settings[-1]),
                "seeds": [_of_seed(record, race.losses) for record in records if record is not None],
                "error": next((r["error"] for r in records if r is not None and r["error"]), None),
            }
        seconds = self._seconds(problem)
        return {"title": race.problem.title, "seconds": seconds, "losses": race.losses, "rows": rows}

    def _run(self, problem: str, optimizer: str, setting: Setting, seed: int) -> Heat:
        return Heat(problem, optimizer, setting, seed, self._seconds(problem), self.quick)

    def _seconds(self, problem: str) -> float:
        return RACES[problem].seconds * (_QUICK_SHARE if self.quick else 1.0)


def _of_seed(record: Record, losses: Sequence[float]) -> dict[str, Any]:
    return {
        "reached": [reached(record["curve"], loss) for loss in losses],
        "final": finite(final(record)),
        "steps": len(record["curve"]),
    }
