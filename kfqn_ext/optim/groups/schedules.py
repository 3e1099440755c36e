"""Hyperparameters as functions of the step k = 1, 2, …, and which of a group's values came from one.

A group holds numbers only, so that it can be saved and loaded; the functions stay with the optimizer. Beside its values
a group keeps what its schedules last wrote: who sets another value has taken over, for good and also after loading.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfqn_ext.optim.groups.hyperparameters import UPDATE_FREQS
from kfqn_ext.optim.groups.validation import check_group, check_split, settle
from kfqn_ext.optim.numbers import number

__all__ = ["Schedule", "burn_in", "dense_then", "running_mean"]

Schedule = Callable[[int], Any]
"""A hyperparameter as a function of the step k = 1, 2, …"""
SCHEDULABLE = ("lr", "damping", *UPDATE_FREQS, "inverse_update_freq", "weight_decay")
WRITTEN = "scheduled"  # of a group: values by name as its schedules last wrote them, None where one was overruled


def burn_in(final: int = 20, growth: int = 20) -> Callable[[int], int]:
    """Update frequency that starts at every step and grows in proportion to the steps taken.

    T(k) = min(final, max(1, k // growth)): 1 for the first 2 · growth steps, ``final`` after final · growth.
    Activations grow fast early on, and an inverse that is not updated meanwhile makes the loss diverge. Where
    ``growth`` is below ``final``, updates come every ``growth`` steps until T is final: T(k) = m divides
    k = m · growth.

    Args:
        final: T in the end.
        growth: Steps per unit of T.

    Returns:
        The schedule.
    """
    return _BurnIn(final, growth)


@dataclass(frozen=True, repr=False)
class _BurnIn:
    """A default of constructors, whose signatures show it."""

    final: int
    growth: int

    def __call__(self, k: int) -> int:
        return min(self.final, max(1, k // self.growth))

    def __repr__(self) -> str:
        return f"burn_in(final={self.final}, growth={self.growth})"


BURN_IN = burn_in()
QUICK_BURN_IN = burn_in(growth=5)
"""Of the forms whose lengths of steps are set: no stale inverse makes these too long."""


def dense_then(every: int = 20, until: int = 20) -> Callable[[int], int]:
    """Update frequency 1 up to some step, then another one: the published codes' schedule of KFAC's inverses.

    Args:
        every: T in the end.
        until: The last step with T = 1.

    Returns:
        The schedule.
    """
    return lambda k: 1 if k <= until else every


def running_mean(decay: float = 0.9) -> Callable[[int], float]:
    """Weight β of a moving average that starts as the mean of all minibatches: β(k) = min(1 - 1/k, decay).

    For the ``decay`` of :class:`~kfqn_ext.optim.inverses.OmegaInverse` and its like; from Martens and Grosse,
    "Optimizing neural networks with Kronecker-factored approximate curvature" (2015). It is the mean where every
    minibatch enters (T₁ = 1), for k counts steps: with T₁ > 1 what was found first, in a warm start or the first
    minibatch, weighs more than the rest. With T₁ = 1 that is forgotten at k = 1, where β is 0.

    Args:
        decay: β in the end.

    Returns:
        The schedule.
    """
    return lambda k: min(1.0 - 1.0 / k, decay)


def take_schedules(group: dict[str, Any], step: int) -> dict[str, Schedule]:
    """Replace a group's functions by their values for the next step, and return the functions."""
    found: dict[str, Schedule] = {key: group[key] for key in SCHEDULABLE if callable(group.get(key))}
    _write(group, {key: number(schedule(step + 1)) for key, schedule in found.items()})
    return found


def apply_schedules(
    groups: Sequence[dict[str, Any]], schedules: Sequence[dict[str, Schedule]], split: Mapping[tuple[int, int], Any]
) -> None:
    """Set all groups' values for the step that begins, except those that somebody else has set meanwhile.

    Args:
        groups: All groups.
        schedules: The functions of each.
        split: Names of layers with weight and bias in two groups, by the indices of these.

    Raises:
        ValueError: If a schedule has left the range of its hyperparameter, or weight and bias of a layer have no common
            step any more; the groups keep their values.
    """
    for group in groups:
        settle(group)
    values = [_values(group, functions) for group, functions in zip(groups, schedules, strict=True)]
    check_split([{**group, **new} if new else group for group, new in zip(groups, values, strict=True)], split)
    for group, functions, new in zip(groups, schedules, values, strict=True):
        if functions:
            _write(group, new, dict.fromkeys(functions))


def _values(group: dict[str, Any], schedules: dict[str, Schedule]) -> dict[str, Any]:
    """What a group's functions say about the step that begins."""
    step = group["step"] + 1
    values = {key: number(schedules[key](step)) for key in schedules if _is_followed(group, key)}
    if schedules:
        check_group({**group, **values})
    return values


def followed(group: dict[str, Any], schedules: dict[str, Schedule]) -> set[str]:
    """Which of a group's values still come from its functions."""
    return {key for key in schedules if _is_followed(group, key)}


def _is_followed(group: dict[str, Any], key: str) -> bool:
    """Whether a value is still the one that its schedule wrote; of a group that was saved without one, any is."""
    written = group.get(WRITTEN, {})
    return key not in written or bool(written[key] is not None and written[key] == group[key])


def _write(group: dict[str, Any], values: dict[str, Any], others: dict[str, Any] | None = None) -> None:
    group.update({**values, WRITTEN: {**(others or {}), **values}})
