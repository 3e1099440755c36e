"""One optimizer of the comparison: how it is built, which settings it may be tuned over, and how its step is called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kfqn_ext.optim import Minibatch

Setting = Mapping[str, float]
Optimizers = Sequence[Optimizer]


def loop(optimizers: Optimizers, batch: Minibatch) -> Tensor:
    """A backward pass, then the steps of all: the loop of any training script."""
    loss = batch()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def closure(optimizers: Optimizers, batch: Minibatch) -> Tensor:
    """The minibatch goes to the one optimizer, which runs it as often as it needs."""
    (optimizer,) = optimizers
    return optimizer.step(batch)


def of_parameters(make: Callable[..., Optimizer]) -> Callable[..., Optimizers]:
    """Of a constructor that takes parameters."""
    return lambda model, **setting: (make(model.parameters(), **setting),)


def of_model(make: Callable[..., Optimizer]) -> Callable[..., Optimizers]:
    """Of a constructor that takes a model."""
    return lambda model, **setting: (make(model, **setting),)


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        title: What its row is called.
        build: (model, **setting) ↦ the optimizers that together train it.
        grid: Settings in order, from small steps to large ones. One alone, which may be empty, is not tuned.
        step: How a minibatch becomes a step.
        samples: Whether it draws targets from the network's distribution.
    """

    title: str
    build: Callable[..., Optimizers]
    grid: Sequence[Setting] = ({},)
    step: Callable[[Optimizers, Minibatch], Tensor] = loop
    samples: bool = False

    @property
    def is_tuned(self) -> bool:
        """Whether there is more than one setting."""
        return len(self.grid) > 1

    def defaults(self) -> Mapping[str, Any]:
        """The hyperparameters that it has where it is told none."""
        optimizer, *_ = self.build(nn.Linear(1, 1))
        return optimizer.param_groups[0]


def rates(*values: float) -> tuple[Setting, ...]:
    """A grid of rates alone."""
    return tuple({"lr": value} for value in values)


def pairs(*values: tuple[float, float]) -> tuple[Setting, ...]:
    """A grid of pairs (α, λ)."""
    return tuple({"lr": lr, "damping": damping} for lr, damping in values)
