"""Which runs the protocol asks for, given those that are finished."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.untuned.entry import Entry, Setting
from benchmarks.untuned.log import Found, Trial
from workloads.records import Record

BASE = "adam"
_ABOUT = 1.1  # of two numbers of steps: how far they are from each other at most
_WINDOW = 3  # settings that are tried again in longer runs: the best one and its neighbours


@dataclass(frozen=True)
class Protocol:
    """How often everything runs.

    Attributes:
        lengths: Numbers of steps, the shortest first.
        seeds: The first one is tuned on.
    """

    lengths: Sequence[int]
    seeds: Sequence[int]

    def due(self, problem: str, name: str, entry: Entry, found: Found) -> list[Trial]:
        """What can run now of one optimizer on one problem."""
        runs = [run for run in self._known(problem, name, entry, found) if run.key not in found]
        return [] if self._hopeless(problem, name, entry, found) else runs

    def steps(self, entry: Entry) -> int:
        """Steps of an optimizer on one problem, all in all."""
        tried = len(entry.grid), *[min(_WINDOW, len(entry.grid))] * (len(self.lengths) - 1)
        return sum(
            steps * (settings + len(self.seeds) - 1) for steps, settings in zip(self.lengths, tried, strict=True)
        )

    def candidates(self, problem: str, name: str, entry: Entry, steps: int, found: Found) -> Sequence[Setting]:
        """Settings that are tried at a length: the whole grid at the first, a window around its best at others."""
        if steps == self.lengths[0]:
            return entry.grid
        ranked = self._ranked(problem, name, entry, self.lengths[0], found)
        if not ranked:
            return []
        first = max(0, min(entry.grid.index(ranked[0]) - _WINDOW // 2, len(entry.grid) - _WINDOW))
        return entry.grid[first : first + _WINDOW]

    def best(self, problem: str, name: str, entry: Entry, steps: int, found: Found) -> Setting | None:
        """The setting with the lowest loss of the first seed, of those that no other seed is known to fail with.

        Returns:
            The setting, or None until all candidates have run.
        """

        def holds(setting: Setting) -> bool:
            keys = [Trial(problem, name, setting, steps, seed).key for seed in self.seeds]
            return all(math.isfinite(loss(found[key])) for key in keys if key in found)

        ranked = self._ranked(problem, name, entry, steps, found)
        return next(filter(holds, ranked), ranked[0] if ranked else None)

    def _ranked(self, problem: str, name: str, entry: Entry, steps: int, found: Found) -> list[Setting]:
        """The candidates at a length by their losses of the first seed, the lowest before; none until all have run."""
        settings = self.candidates(problem, name, entry, steps, found)
        keys = [Trial(problem, name, setting, steps, self.seeds[0]).key for setting in settings]
        if any(key not in found for key in keys):
            return []
        return [setting for setting, _ in sorted(zip(settings, keys, strict=True), key=lambda p: loss(found[p[1]]))]

    def _known(self, problem: str, name: str, entry: Entry, found: Found) -> Iterator[Trial]:
        """Runs that are known to be needed, finished or not: the first seed's, and others' once that is tuned."""
        for steps in self.lengths:
            for setting in self.candidates(problem, name, entry, steps, found):
                yield Trial(problem, name, setting, steps, self.seeds[0])
        for steps in self.lengths:
            best = self.best(problem, name, entry, steps, found)
            if best is not None:
                yield from (Trial(problem, name, best, steps, seed) for seed in self.seeds[1:])
        if not entry.is_tuned:
            yield from self._known_in_seconds(problem, name, entry, found)

    def _known_in_seconds(self, problem: str, name: str, entry: Entry, found: Found) -> Iterator[Trial]:
        """Shorter runs of what is not tuned, whose rate falls to zero by the time that Adam takes for all steps."""
        for steps in self.lengths:
            fitted = self._fitted(problem, name, steps, found)
            for seed in self.seeds if fitted is not None else ():
                if self.in_seconds(problem, name, steps, seed, found) is None:
                    yield Trial(problem, name, entry.grid[0], fitted, seed)

    def _fitted(self, problem: str, name: str, steps: int, found: Found) -> int | None:
        """How many steps take as long as all of Adam's; None until that is known, and where they are no fewer."""
        own, base = ([r["seconds"] for r in _of(found, problem, who) if r["steps"] == steps] for who in (name, BASE))
        if len(own) < len(self.seeds) or len(base) < len(self.seeds):
            return None
        fitted = max(1, round(steps * fmean(base) / fmean(own)))
        return fitted if fitted < steps else None

    def in_seconds(self, problem: str, name: str, steps: int, seed: int, found: Found) -> Record | None:
        """The shorter run that stands for a length: the one of about as many steps as take Adam's seconds.

        About: as more of Adam's runs end, the mean of its seconds moves.
        """
        fitted = self._fitted(problem, name, steps, found)
        if fitted is None:
            return None
        runs = [r for r in _of(found, problem, name) if r["seed"] == seed and self._is_shorter(r["steps"], fitted)]
        return min(runs, key=lambda run: abs(run["steps"] - fitted), default=None)

    def _is_shorter(self, steps: int, fitted: int) -> bool:
        """Whether a run of so many steps is one that was made for these, or for about as many."""
        near = max(steps, fitted) <= _ABOUT * min(steps, fitted)
        return steps == fitted or (near and steps not in self.lengths)

    def _hopeless(self, problem: str, name: str, entry: Entry, found: Found) -> bool:
        """Whether the optimizer does not even begin on this problem, so that no more is asked of it."""
        firsts = [Trial(problem, name, setting, self.lengths[0], self.seeds[0]) for setting in entry.grid]
        return all(run.key in found and not found[run.key]["curve"] for run in firsts)


def _of(found: Found, problem: str, name: str) -> list[Record]:
    return [r for r in found.values() if r["problem"] == problem and r["optimizer"] == name]


def loss(record: Record) -> float:
    """Final loss of a run, infinite where it diverged or broke off."""
    failed = record["diverged"] or record["error"] or record["final"] is None
    return math.inf if failed else record["final"]
