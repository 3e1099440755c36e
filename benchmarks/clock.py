"""Times of several things side by side, so that what slows the machine down slows all of them."""

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Run = Callable[[], object]
# What is slow is run less often: all its runs together may take as long as so many turns' worth of base runs.
_SHARE = 3


def prepare(device: str) -> torch.device:
    """Set what holds for every measurement in this process."""
    warnings.simplefilter("ignore")  # other packages use what torch has deprecated
    torch.set_num_threads(1)
    return torch.device(device)


def now(device: torch.device) -> float:
    """Seconds: on a CPU those of this process, so that what others run does not count."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@dataclass
class Times:
    """What was measured.

    Attributes:
        seconds: Seconds of each run by name, one a turn in which it ran.
        ratios: The same, divided by the base's seconds in the same turn.
        errors: Why a name has no times.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Median ratio to the base. The first turn warms up: it counts for what is too slow to be run again."""
        return statistics.median(_warm(self.ratios[name]))

    def base_seconds(self, base: str) -> float:
        """Median seconds of the base."""
        return statistics.median(_warm(self.seconds[base]))


def _warm(values: list[float]) -> list[float]:
    return values[1:] or values


def interleave(
    runs: Mapping[str, Run], base: str, turns: int, device: torch.device, before: Mapping[str, Run] | None = None
) -> Times:
    """Run everything once a turn, in random order.

    Args:
        runs: What to run, by name.
        base: The name of what all others are compared with.
        turns: How many turns.
        device: What it runs on.
        before: What runs just before, untimed: it leaves the caches as they are in use, not as others leave them.

    Returns:
        Times of all; a run that raises is left out of later turns.
    """
    times, order = Times(), list(runs)
    for name in order:
        times.seconds[name], times.ratios[name] = [], []
    for _ in range(turns):
        random.shuffle(order)
        allowed = _SHARE * sum(times.seconds[base])
        turn: dict[str, float] = {}
        for name in order:
            if name in times.errors or (times.seconds[name] and name != base and sum(times.seconds[name]) > allowed):
                continue
            try:
                if before is not None:
                    before[name]()
                turn[name] = _seconds(runs[name], device)
            except Exception as error:
                if name == base:
                    raise
                times.errors[name] = first_line(error)
        for name, seconds in turn.items():
            times.seconds[name].append(seconds)
            times.ratios[name].append(seconds / turn[base])
    return times


def _seconds(run: Run, device: torch.device) -> float:
    start = now(device)
    run()
    return now(device) - start
