"""One run, named by everything that decides its result."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from examples.paper.methods import METHODS, Settings, early, geometric
from examples.paper.problems import PROBLEMS

Frequency = int | Literal["geometric", "early"]


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

    @property
    def key(self) -> str:
        """Readable, unique, and usable as a file name."""
        values = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(values.encode()).hexdigest()[:8]
        return f"{self.problem}-{self.method}-seed{self.seed}-{digest}"

    def continues(self, other: "Cell") -> bool:
        """Whether a run of this cell can go on from a checkpoint of another: all but the budget is the same."""
        budget = {"epochs": None, "seconds": None, "steps": 1, "evaluate_every": 1}
        return replace(self, **budget) == replace(other, **budget)

    @property
    def settings(self) -> Settings:
        return Settings(
            lr=self.lr,
            damping=self.damping,
            weight_decay=self.weight_decay,
            update_freq={"geometric": geometric, "early": early}.get(self.update_freq, self.update_freq or 1),
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
