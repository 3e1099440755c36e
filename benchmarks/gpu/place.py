"""Where the check runs, and the clock there."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from workloads.clock import wait

Run = Callable[[], object]


@dataclass(frozen=True)
class Place:
    """Where the check runs.

    Attributes:
        device: A GPU, or the CPU, on which it shows that it runs.
        quick: Small networks.
        data_root: Folder of torchvision's MNIST.
        ends: When all is to be over, by ``time.perf_counter()``.
        failures: What went wrong, where a section went on without it.
    """

    device: torch.device
    quick: bool
    data_root: Path
    ends: float
    failures: list[str] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.ends - time.perf_counter()

    @property
    def turns(self) -> int:
        """How often what is timed runs."""
        return 2 if self.quick else 9

    @property
    def problems(self) -> tuple[str, ...]:
        """What is measured: all three, or the smallest."""
        return ("autoencoder",) if self.quick else tuple(PROBLEMS)

    def set_up(self, problem: str) -> Setup:
        """A fresh network with one minibatch, when those before it are gone: optimizers and hooks are in cycles."""
        gc.collect()
        return set_up((QUICK if self.quick else PROBLEMS)[problem], self.device)

    def milliseconds(self, run: Run) -> float:
        """Of one run: between two events of a GPU, and of the wall clock elsewhere."""
        wait(self.device)
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)
