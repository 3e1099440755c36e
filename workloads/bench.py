"""State and time of one method by the parts of the paper's tables, through the optimizers' public interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

from kfqn_ext.extensions import input_gradients_only
from kfqn_ext.optim import Minibatch
from workloads.clock import now
from workloads.cost_formulas import STATE_PARTS, TIME_PARTS, Frequencies
from workloads.frequencies import set_frequencies
from workloads.methods import METHODS, Settings
from workloads.workload import DAMPING, LR, NEVER, Workload

_INPUT_SIDE = {"A", "Omega", "leverage"}
_MOMENTUM = {"momentum", "momentum_buffer", "exp_avg", "m"}
_SECOND_MOMENT = {"exp_avg_sq", "v"}


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    Attributes:
        state: Bytes of optimizer state by part of ``table_4``.
        seconds: Seconds of an iteration by part of ``table_5``, those of rarer events divided by their frequency.
        iteration: Mean seconds of whole iterations at the given frequencies; None where not measured.
    """

    state: dict[str, float]
    seconds: dict[str, float]
    iteration: float | None


class _Watched(Minibatch):
    """A minibatch that remembers which part of it an optimizer took; None for the whole."""

    taken: Minibatch | None = None

    def fraction(self, fraction: float) -> Minibatch:
        self.taken = super().fraction(fraction)
        return self.taken


class Bench:
    """One method on one workload."""

    def __init__(self, workload: Workload, method: str, freq: Frequencies, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._freq = freq
        self._loss = workload.loss
        self.model: nn.Module = workload.build().to(device)
        settings = Settings(lr=LR, damping=DAMPING, update_freq=freq.T, stats_update_freq=freq.T1)
        self.optimizer: Optimizer = METHODS[method].build(self.model, settings)
        self._batch = _Watched(self.model, self._loss.mean, *workload.data(device), self._loss.sample)
        self._times: dict[str, list[float]] = {}
        self._method = method
        self._is_kfac = METHODS[method].is_kfac

    def measure(self, repeats: int, steps: int) -> Costs:
        """Measure parts ``repeats`` times, and then, if ``steps`` > 0, so many whole iterations."""
        self._set_frequencies(1, 1)
        self.optimizer.step(self._batch)  # makes all state, and shows what it takes for its second pass
        modes = self._modes()
        for repeat in range(repeats + 1):
            for name, run in modes:
                run(name if repeat else "")  # the first one warms up
        seconds = self._by_part({name: median(times) for name, times in self._times.items() if name})
        return Costs(self._state(), seconds, self._iterations(steps) if steps else None)

    # ------------------------------------------------------------------ time by part

    def _modes(self) -> list[tuple[str, Callable[[str], None]]]:
        if METHODS[self._method].first_order:
            return [("ordinary", self._first_order)]
        modes: list[tuple[str, Callable[[str], None]]] = [
            ("ordinary", lambda name: self._two_passes(name, NEVER, NEVER)),
            ("due", lambda name: self._two_passes(name, 1, NEVER)),
        ]
        if self._is_kfac:
            modes.append(("inverse", lambda name: self._two_passes(name, 1, 1)))
        return modes

    def _first_order(self, name: str) -> None:
        with self._timed(name, "gradient"):
            self._batch()
        with self._timed(name, "direction"):
            self.optimizer.step()

    def _two_passes(self, name: str, learn_every: int, invert_every: int) -> None:
        self._set_frequencies(learn_every, invert_every)
        with self._timed(name, "gradient"), self.optimizer.first_pass():
            self._batch()
        self._second_pass(name)
        with self._timed(name, "direction"):
            self.optimizer.step()
        self._second_pass(name)

    def _second_pass(self, name: str) -> None:
        """KFAC's comes before the step, the others' after it."""
        if not self.optimizer.second_pass_due:
            return
        layers = self.optimizer.second_pass_layers
        with self._timed(name, "second pass"), self.optimizer.second_pass():
            self._pass_alone()
        with self._timed(name, "additional pass"), input_gradients_only(self.model, layers):
            self._pass_alone()

    def _pass_alone(self) -> None:
        batch = self._batch.taken or self._batch
        if self.optimizer.recipe.second_pass.sampled:
            batch.sampled(0)
        else:
            batch()

    def _by_part(self, t: dict[str, float]) -> dict[str, float]:
        """Split into the columns of ``table_5``: what a due step takes longer is curvature, but for the pass itself."""
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        parts["gradient"], parts["direction"] = t["ordinary gradient"], t["ordinary direction"]
        if "due gradient" in t:
            every = self._freq.T1 if self._is_kfac else self._freq.T
            extra_pass = t.get("due additional pass", 0.0)
            due = t["due gradient"] + t["due direction"] + t.get("due second pass", 0.0)
            parts["additional pass"] = extra_pass / every
            parts["curvature"] = max(0.0, due - parts["gradient"] - parts["direction"] - extra_pass) / every
        if "inverse direction" in t:
            inverse = sum(t[f"inverse {part}"] - t[f"due {part}"] for part in ("direction", "second pass"))
            parts["curvature"] += max(0.0, inverse) / self._freq.T
        return parts

    def _set_frequencies(self, learn_every: int, invert_every: int) -> None:
        """From the first step on, where the method has frequencies."""
        if not METHODS[self._method].first_order:
            set_frequencies(self.optimizer, learn_every, invert_every)
            for group in self.optimizer.param_groups:
                group["step"] = 0

    @contextmanager
    def _timed(self, name: str, part: str) -> Iterator[None]:
        start = now(self._device)
        yield
        self._note(name, part, now(self._device) - start)

    def _note(self, name: str, part: str, seconds: float) -> None:
        if name:
            self._times.setdefault(f"{name} {part}", []).append(seconds)

    # ------------------------------------------------------------------ whole iterations, and memory

    def _iterations(self, steps: int) -> float:
        freq = self._freq
        self._set_frequencies(*((freq.T1, freq.T) if self._is_kfac else (freq.T, 1)))
        start = now(self._device)
        for _ in range(steps):
            self.optimizer.step(self._batch)
        return (now(self._device) - start) / steps

    def _state(self) -> dict[str, float]:
        total = dict.fromkeys(STATE_PARTS, 0.0)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:  # counters are no state to speak of
                    total[_part_of(name)] += value.numel() * value.element_size()
        return total


def _part_of(name: str) -> str:
    if name in _MOMENTUM:
        return "∂W"
    if name in _SECOND_MOMENT:
        return "∂W ⊙ ∂W"
    return "A, H_A" if name in _INPUT_SIDE or name.endswith("_A") else "G, H_G"
