"""The parts of an iteration, as the paper's experiments measure them, by this process's own time."""

from benchmarks.clock import now
from examples.paper.costs.measure import Bench


class QuietBench(Bench):
    """A bench whose clock does not count what others run on a CPU."""

    def _now(self) -> float:
        return now(self._device)
