"""One run, named by everything that decides its result."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from workloads.methods import METHODS, Settings, early, geometric
from workloads.problems import PROBLEMS

Frequency = int | Literal["geometric", "early"]

_SCHEDULES = {"geometric": geometric, "early": early}
_BUDGET = ("epochs", "seconds", "steps", "evaluate_every")
# The smallest value that works, and what the value is.
_AT_LEAST: dict[str, tuple[int, str]] = {
    "lr": (0, "it is the length of a step down"),
    "damping": (0, "it is added to what is inverted"),
    "weight_decay": (0, "it is the rate at which weights shrink"),
    "update_freq": (1, "curvature is updated every so many iterations"),
    "stats_update_freq": (1, "statistics are updated every so many iterations"),
    "epochs": (0, "a run ends after so many"),
    "seconds": (0, "a run ends after so many"),
    "steps": (0, "a run ends after so many"),
    "decay_every": (0, "the learning rate decays after every so many epochs, and never at 0"),
    "evaluate_every": (1, "the network is evaluated after every so many epochs"),
    "batch_size": (1, "a minibatch has so many data"),
    "data_limit": (1, "there are so many training data"),
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        problem: Name of the problem.
        method: Name of the method.
        lr: α.
        damping: λ; Adam's ε.
        weight_decay: γ.
        update_freq: T, for KFAC T₂.
        stats_update_freq: KFAC's T₁.
        seed: Decides initialization, order of the data, and all else that is random.
        epochs, seconds, steps: The budget; the run ends with the first of them that is used up.
        decay_every: The learning rate is multiplied by 0.1 after every so many epochs; 0 for never.
        evaluate_every: Evaluate after every so many epochs, and at the end.
        batch_size: m, if it is not the problem's.
        data_limit: Use so many training data only; None for all.
    """

    problem: str
    method: str
    lr: float
    damping: float | None = None
    weight_decay: float = 0.0
    update_freq: Frequency | None = None
    stats_update_freq: int = 1
    seed: int = 0
    epochs: int | None = None
    seconds: float | None = None
    steps: int | None = None
    decay_every: int = 0
    evaluate_every: int = 1
    batch_size: int | None = None
    data_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "damping", "weight_decay", "seconds"):  # 30 and 30.0 are one cell
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        if self.problem not in PROBLEMS:
            raise ValueError(f"No problem {self.problem!r}; there are {', '.join(PROBLEMS)}.")
        if self.method not in METHODS:
            raise ValueError(f"No method {self.method!r}; there are {', '.join(METHODS)}.")
        if METHODS[self.method].has_damping and self.damping is None:
            raise ValueError(f"{self.method} needs a damping.")
        if not METHODS[self.method].first_order and self.update_freq is None:
            raise ValueError(f"{self.method} needs an update_freq.")
        if self.epochs is None and self.seconds is None and self.steps is None:
            raise ValueError("A run needs a budget: epochs, seconds or steps.")
        self._check_values()

    def _check_values(self) -> None:
        for name, (least, what) in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None or (name == "update_freq" and value in _SCHEDULES):
                continue
            if isinstance(value, str) or not least <= value < math.inf:
                schedules = f", or {' or '.join(_SCHEDULES)}" if name == "update_freq" else ""
                raise ValueError(f"{name} can't be {value}: {what}. Give a number, {least} or more{schedules}.")
        if self.damping == 0 and not METHODS[self.method].first_order:
            raise ValueError(f"damping can't be 0 for {self.method}: A + λI has to be invertible. Give more than 0.")

    @property
    def key(self) -> str:
        """Readable, unique, and usable as a file name."""
        values = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(values.encode()).hexdigest()[:8]
        return f"{self.problem}-{self.method}-seed{self.seed}-{digest}"

    def differences(self, other: "Cell") -> list[str]:
        """What keeps a run of ``other`` from going on where one of this cell stopped: all but the budget must agree."""
        ours, theirs = asdict(self), asdict(other)
        names = [name for name in ours if name not in _BUDGET and ours[name] != theirs[name]]
        return [f"{name} {ours[name]}, not {theirs[name]}" for name in names]

    @property
    def settings(self) -> Settings:
        return Settings(
            lr=self.lr,
            damping=self.damping,
            weight_decay=self.weight_decay,
            update_freq=1 if self.update_freq is None else _SCHEDULES.get(self.update_freq, self.update_freq),
            stats_update_freq=self.stats_update_freq,
        )

    def lr_at(self, epoch: int) -> float:
        """α_k in an epoch, counted from 0."""
        return self.lr * 0.1 ** (epoch // self.decay_every) if self.decay_every else self.lr

    def describe(self) -> str:
        """Hyperparameters for a person."""
        values: dict[str, Any] = {"lr": self.lr, "damping": self.damping, "weight decay": self.weight_decay or None}
        parts = [f"{name} {value:g}" for name, value in values.items() if value is not None]
        parts += [] if self.update_freq is None else [f"T {self.update_freq}"]
        return ", ".join([*parts, f"seed {self.seed}"])
