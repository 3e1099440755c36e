"""The one or two passes over a minibatch: each run under its extensions, the second as a repetition of the first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from kfqn_ext.extensions import SingleCalls, measuring, read_inputs
from kfqn_ext.optim.groups.plan import Layer
from kfqn_ext.optim.inverses.base import Kind
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import checks
from kfqn_ext.optim.passes.gradient_watch import GradientWatch
from kfqn_ext.optim.passes.listening import Listening
from kfqn_ext.optim.passes.measurement import Measurement, Probes, Results
from kfqn_ext.optim.passes.reading import Reading
from kfqn_ext.optim.passes.reduction import OneProcess, Reduction
from kfqn_ext.optim.passes.replay import Replay
from kfqn_ext.optim.passes.warm_start import measure_data
from kfqn_ext.optim.recipe import Recipe, SecondPass

Wanted = Mapping[Kind, Sequence[nn.Module]]


class Passes:
    """Runs and measures passes over a model's minibatches.

    Attributes:
        reduction: Pools what several processes have measured.
        listening: What passes have shown that nobody announced.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, loss_reduction: str, fraction: float) -> None:
        """Prepare to measure what a recipe needs.

        Args:
            model: The model.
            recipe: The row of the table.
            loss_reduction: "mean" or "sum": what the loss does over the data of a batch.
            fraction: Of each minibatch, in (0, 1], what curvature is learned from.
        """
        self.reduction: Reduction = OneProcess()
        self.listening = Listening()
        self._model, self._recipe = model, recipe
        self._compares = recipe.second_pass is SecondPass.REPEAT_AFTER_STEP
        self._compared = recipe.second if self._compares else frozenset()
        self._repeats = recipe.second_pass is not SecondPass.NONE
        self._loss_reduction, self._fraction = loss_reduction, fraction
        self._replay = Replay(model)
        self._single_calls = SingleCalls()
        self._other_data = LateWarning(
            "A second pass read other data than the first; nothing was learned from the two. Draw the minibatch outside"
            " of the closure, so that it is the same at each call."
        )
        self._has_other_rows = False  # in a layer, than others have: its first rows need not be the first data's

    @property
    def fraction(self) -> float:
        """The fraction of a minibatch that the second pass runs, and whose first pass it is compared with.

        All of it where a part alone would give other outputs than within the whole, for all that is known.
        """
        in_part = self._fraction == 1 or not self._compares or self._replay.repeatable_in_part
        return self._fraction if in_part and not self._has_other_rows else 1.0

    def can_compare(self, fraction: float) -> bool:
        """Whether a second pass would repeat the first one, of which a fraction was measured, for all that is known.

        A first pass may have shown that parts of it can't be repeated, or that it can't as yet.
        """
        return self.fraction <= fraction and self._replay.is_exact

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """Have second passes compute parameters' gradients too: in the body, and ever after where it succeeds."""
        before, self._replay.with_gradients = self._replay.with_gradients, True
        try:
            yield
        except BaseException:
            self._replay.with_gradients = before
            raise

    @contextmanager
    def first(
        self,
        wanted: Wanted,
        probes: Probes,
        parameters: Iterable[Tensor],
        loss_scale: float | None,
        may_repeat: bool,
    ) -> Iterator[Results]:
        """Measure the forward and backward pass in the body, beside what the caller's own extensions do there.

        Args:
            wanted: Modules by extension.
            probes: Choose directions for each module.
            parameters: Those of which one must get a gradient.
            loss_scale: What the loss is multiplied with, where it is.
            may_repeat: Whether a second pass may follow.

        Yields:
            What was measured; it fills when the body ends.

        Raises:
            RuntimeError: If no gradient changed, or one came in float16 without a ``loss_scale``.
            ValueError: If all batches were empty.
        """
        results, gradients = Results(), GradientWatch(parameters)
        measurement = self.measurement(wanted, probes, loss_scale)
        may_repeat = may_repeat and self._repeats
        if may_repeat:
            self._replay.record()
            results.reading = Reading(self.fraction)
        with (
            self.listening.paused(),
            nullcontext() if results.reading is None else read_inputs(results.reading),
            measuring(measurement.extensions),
        ):
            yield results
        checks.first_pass(measurement, gradients)
        if results.reading is not None:
            self._replay.look_for_writes()
            if self._fraction < 1:
                self._replay.look_for_draws()
                self._has_other_rows |= len(results.reading.rows) > 1
        results.update(self.results(measurement))

    def measurement(self, wanted: Wanted, probes: Probes, loss_scale: float | None = None) -> Measurement:
        """Prepare to measure the pass, or the passes, that a step's gradient comes from."""
        compared = self.fraction
        if loss_scale is None and self._recipe.output_inverse.in_own_units:
            loss_scale = 1.0  # nothing that is learned depends on it
        return Measurement(
            wanted,
            self._loss_reduction,
            probes,
            loss_scale,
            lambda kind: compared if kind in self._compared else self._fraction,
            of_grad=True,
            single=self._single_calls,
        )

    def results(self, measurement: Measurement) -> Results:
        """What was measured, in all processes."""
        return self.reduction.pooled(measurement.results())

    @contextmanager
    def second(
        self, wanted: Wanted, layers: Sequence[Layer], first: Results, loss_scale: float | None
    ) -> Iterator[Results]:
        """Measure the repetition of a minibatch in the body; it leaves no trace.

        Args:
            wanted: Modules by extension.
            layers: Those that are due; below the first of them the pass needs no gradient.
            first: What the first pass has shown.
            loss_scale: What the loss is multiplied with, where it is.

        Yields:
            What was measured; it fills when the body ends.

        Raises:
            RuntimeError: If none of the layers was reached, or gradients came in float16 without a ``loss_scale``.
        """
        results, reading = Results(), Reading(1.0)
        probes = Probes(A=lambda module, a_bar: None)
        measurement = Measurement(wanted, self._loss_reduction, probes, loss_scale, of_grad=True)
        with (
            checks.reaching(layers, measurement),
            read_inputs(reading),
            self._replay.repeat([layer.module for layer in layers]),
            measuring(measurement.extensions, alone=True),
        ):
            yield results
        checks.second_pass(layers, measurement)
        if first.reading is not None:
            results.same_data = first.reading.agrees_with(reading)
            self._other_data.note(~results.same_data)
        if self._replay.is_exact:
            results.update(self.results(measurement))

    def over_data(
        self,
        layers: Sequence[Layer],
        loader: Iterable[Any],
        forward: Callable[[Any], Any] | None,
        progress: bool,
    ) -> Results:
        """Measure what makes the initial curvature, over a data set; see :func:`measure_data`."""
        results = measure_data(self._model, layers, self._recipe, self._loss_reduction, loader, forward, progress)
        return self.reduction.pooled(results)
