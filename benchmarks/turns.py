"""Times of several things side by side, so that what slows the machine down slows all of them."""

import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from workloads.clock import now

Run = Callable[[], object]
# What is slow is run less often: all its runs together may take as long as so many runs of the base a turn.
_SHARE = 3


def prepare(device: str) -> torch.device:
    """Set what holds for every measurement in this process."""
    warnings.simplefilter("ignore")  # other packages use what torch has deprecated
    torch.set_num_threads(1)
    return torch.device(device)


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@dataclass
class Times:
    """What was measured.

    Attributes:
        seconds: Seconds of each run by name, one a turn in which it ran; of the base, one beside each of them.
        ratios: The same, divided by the mean of the base's seconds right before and right after.
        errors: Why a name has no times.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Median ratio to the base."""
        return statistics.median(counted(self.ratios[name]))

    def base_seconds(self, base: str) -> float:
        """Median seconds of the base."""
        return statistics.median(counted(self.seconds[base]))


def counted(values: Sequence[float]) -> Sequence[float]:
    """What a median is of: the first turn warms up, and counts only for what is too slow to be run again."""
    return values[1:] or values


def interleave(
    runs: Mapping[str, Run], base: str, turns: int, device: torch.device, before: Mapping[str, Run] | None = None
) -> Times:
    """Run everything once a turn, in random order, and the base between any two.

    Args:
        runs: What to run, by name.
        base: The name of what all others are compared with.
        turns: How many turns.
        device: What it runs on.
        before: What runs just before, untimed: it leaves the caches as they are in use, not as others leave them.

    Returns:
        Times of all; a run that raises is left out of later turns.
    """
    times, others = Times(), [name for name in runs if name != base]
    for name in runs:
        times.seconds[name], times.ratios[name] = [], []

    def timed(name: str) -> float:
        if before is not None:
            before[name]()
        times.seconds[name].append(_seconds(runs[name], device))
        return times.seconds[name][-1]

    for turn in range(turns):
        random.shuffle(others)
        last = timed(base)
        for name in others:
            if name in times.errors or sum(times.seconds[name]) > _SHARE * turn * times.base_seconds(base):
                continue
            try:
                seconds = timed(name)
            except Exception as error:
                times.errors[name] = first_line(error)
                continue
            following = timed(base)
            times.ratios[name].append(2.0 * seconds / (last + following))
            last = following
    times.ratios[base] = [1.0 for _ in times.seconds[base]]
    return times


def _seconds(run: Run, device: torch.device) -> float:
    start = now(device)
    run()
    return now(device) - start
