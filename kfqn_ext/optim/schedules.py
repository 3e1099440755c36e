"""Hyperparameters as functions of the step k = 1, 2, …, and which of a group's values came from one.

A group holds numbers only, so that it can be saved and loaded; the functions stay with the optimizer.
"""

from collections.abc import Callable
from typing import Any

from kfqn_ext.optim.validation import check_group

Schedule = Callable[[int], Any]
SCHEDULABLE = ("lr", "damping", "curvature_update_freq", "inverse_update_freq", "weight_decay")


def burn_in(final: int = 20, growth: int = 20) -> Callable[[int], int]:
    """Update frequency that starts at every step and grows in proportion to the steps taken.

    T(k) = min(final, max(1, k // growth)): 1 for the first 2 · growth steps, ``final`` after final · growth.
    Activations grow fast early on, and an inverse that is not updated meanwhile makes the loss diverge.

    Args:
        final: T in the end.
        growth: Steps per unit of T.

    Returns:
        The schedule.
    """
    return lambda k: min(final, max(1, k // growth))


BURN_IN = burn_in()


def dense_then(every: int = 20, until: int = 20) -> Callable[[int], int]:
    """Update frequency 1 up to step ``until``, then ``every``: the published codes' schedule of KFAC's inverses."""
    return lambda k: 1 if k <= until else every


def running_mean(decay: float = 0.9) -> Callable[[int], float]:
    """Weight β of a moving average that starts as the mean of all minibatches: β(k) = min(1 - 1/k, decay).

    For the ``decay`` of :class:`~kfqn_ext.optim.sides.OmegaInverse` and its like; from Martens and Grosse, "Optimizing
    neural networks with Kronecker-factored approximate curvature" (2015). What a warm start found is forgotten at
    k = 1, where β is 0.

    Args:
        decay: β in the end.

    Returns:
        The schedule.
    """
    return lambda k: min(1.0 - 1.0 / k, decay)


def take_schedules(group: dict[str, Any], step: int) -> dict[str, Schedule]:
    """Replace a group's functions by their values for the next step, and return the functions."""
    found: dict[str, Schedule] = {key: group[key] for key in SCHEDULABLE if callable(group.get(key))}
    group.update({key: schedule(step + 1) for key, schedule in found.items()})
    return found


def apply_schedules(group: dict[str, Any], schedules: dict[str, Schedule]) -> None:
    """Set a group's scheduled values for its next step.

    Raises:
        ValueError: If a schedule has left the range of its hyperparameter; the group keeps its values.
    """
    values = {key: schedule(group["step"] + 1) for key, schedule in schedules.items()}
    if values:
        check_group({**group, **values})
        group.update(values)
