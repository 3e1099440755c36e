"""Seconds by phase: the paper's process time counts training, not warm start and evaluation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workloads.clock import wait


class PhaseClock:
    """Adds up wall-clock and CPU seconds of the phases of a run.

    Attributes:
        wall: Wall-clock seconds by phase.
        cpu: CPU seconds of this process, all threads, by phase.
    """

    PHASES = ("train", "warm_start", "evaluate")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wall = dict.fromkeys(self.PHASES, 0.0)
        self.cpu = dict.fromkeys(self.PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wait(self._device)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            wait(self._device)
            self.wall[name] += time.perf_counter() - wall
            self.cpu[name] += time.process_time() - cpu

    def record(self) -> dict[str, float]:
        """Columns of an epoch's line."""
        return {
            "seconds": round(self.wall["train"], 3),
            "cpu_seconds": round(self.cpu["train"], 3),
            "warm_start_seconds": round(self.wall["warm_start"], 3),
            "evaluation_seconds": round(self.wall["evaluate"], 3),
        }

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"wall": dict(self.wall), "cpu": dict(self.cpu)}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.wall, self.cpu = dict(state["wall"]), dict(state["cpu"])
