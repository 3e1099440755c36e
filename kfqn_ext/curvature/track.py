"""The ladder along a training run: how H_A and H_G learn."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kfqn_ext.curvature.entry import measuring
from kfqn_ext.curvature.exact import MEMORY_BUDGET
from kfqn_ext.curvature.factors import HoldsInverses
from kfqn_ext.curvature.ladder import check_memory, check_numbers, check_products, curvature_ladder, used_layers
from kfqn_ext.curvature.lazy import need
from kfqn_ext.curvature.plots import plot_tracks
from kfqn_ext.curvature.problem import LossFn
from kfqn_ext.curvature.report import CurvatureReport


class CurvatureTracker:
    """Compares what an optimizer holds with the exact curvature, at chosen steps. Made by :func:`track_curvature`.

    Attributes:
        reports: (step, report) of each measurement.
        step: How many times it was called.
    """

    def __init__(
        self, optimizer: HoldsInverses, steps: int | Container[int], name: str, ladder: dict[str, Any]
    ) -> None:
        """Hold the arguments of the comparison.

        Args:
            optimizer: An optimizer with ``inverses(weight)``.
            steps: Measure every so many calls, or at the calls with these numbers (from 1).
            name: Name of the optimizer in the reports.
            ladder: Arguments of :func:`curvature_ladder`.
        """
        self.reports: list[tuple[int, CurvatureReport]] = []
        self.step = 0
        self._optimizer, self._steps, self._name, self._ladder = optimizer, steps, name, ladder

    def __call__(self, *_: Any) -> None:
        """Count a step, and measure where it is one of those chosen.

        Takes and ignores what a hook is given, so that it can also be registered:
        ``optimizer.register_step_post_hook(tracker)``.
        """
        self.step += 1
        due = self.step % self._steps == 0 if isinstance(self._steps, int) else self.step in self._steps
        if due:
            self.measure()

    def measure(self) -> CurvatureReport:
        """Measure now, and keep the report."""
        report = curvature_ladder(optimizers={self._name: self._optimizer}, **self._ladder)
        self.reports.append((self.step, report))
        return report

    def to_dataframe(self) -> Any:
        """All numbers as a ``pandas.DataFrame``: that of :class:`CurvatureReport`, with the step before it.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        pandas = need("pandas", "to_dataframe()")
        frames = [report.to_dataframe() for _, report in self.reports]
        for frame, (step, _) in zip(frames, self.reports, strict=True):
            frame.insert(0, "step", step)
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def plot(self, path: str | Path) -> None:
        """Draw errors of H_A, H_G and their product by step; dotted, gradient descent's with the same λ.

        Args:
            path: File to write.

        Raises:
            ValueError: If nothing was measured.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        plot_tracks({self._name: self.reports}, path)


@measuring()
def track_curvature(
    optimizer: HoldsInverses,
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layers: Sequence[str | nn.Module] | None = None,
    *,
    steps: int | Container[int] = 20,
    name: str | None = None,
    damping: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    memory_budget: int = 4 * MEMORY_BUDGET,
    progress: bool = False,
) -> CurvatureTracker:
    """Make a callback that compares an optimizer's H_A and H_G with the exact curvature during training.

    Example:
        >>> import torch
        >>> from kfqn_ext import KBFGS, Minibatch
        >>> from kfqn_ext.curvature import track_curvature
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.rand(8, 3), torch.arange(8) % 2
        >>> loss_fn = torch.nn.functional.cross_entropy
        >>> optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
        >>> tracker = track_curvature(optimizer, model, loss_fn, x, y, layers=["0"], steps=2)
        >>> for _ in range(4):
        ...     loss = optimizer.step(Minibatch(model, loss_fn, x, y))
        ...     tracker()
        >>> [step for step, report in tracker.reports]
        [2, 4]

    Args:
        optimizer: An optimizer with ``inverses(weight)``, as those of this package have.
        model: The model that it trains. Measurements leave it, and all random numbers, as they are.
        loss_fn: Maps (model output, y) to a scalar, a mean over data.
        x: Input of the minibatch to measure on, the same in all measurements.
        y: Its targets.
        layers: Names of layers, or layers; all that can be measured if None.
        steps: Measure every so many calls, or at the calls with these numbers (from 1).
        name: Name of the optimizer in the reports; its class by default.
        damping: λ of the rungs without damping of their own; the optimizer's by default.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: As :func:`curvature_ladder`.
        progress: Whether to show progress bars in a measurement.

    Returns:
        The tracker; call it after each step.

    Raises:
        ValueError: If ``steps`` is neither an integer of at least 1 nor a collection of them; and, before a step of
            training is spent, as :func:`curvature_ladder`.
        UnsupportedLayerError: As :func:`curvature_ladder`.
        MemoryError: As :func:`curvature_ladder`.
    """
    if not isinstance(steps, (int, Container)) or (isinstance(steps, int) and steps < 1):
        raise ValueError(
            f"steps={steps}: give an integer, at least 1, to measure every so many steps, or a set of them."
        )
    check_numbers(model, damping, dtype)
    layers = layers if layers is None or isinstance(layers, (str, nn.Module)) else list(layers)
    problems, _ = used_layers(model, loss_fn, x, y, layers, dtype)
    check_memory(problems, memory_budget, 1)
    check_products(problems, layers)
    ladder = dict(model=model, loss_fn=loss_fn, x=x, y=y, layers=layers, damping=damping, dtype=dtype)
    ladder |= dict(memory_budget=memory_budget, progress=progress)
    return CurvatureTracker(optimizer, steps, name or type(optimizer).__name__, ladder)
