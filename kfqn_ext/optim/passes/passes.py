"""The one or two passes over a minibatch: each run under its extensions, the second as a repetition of the first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kfqn_ext._torch import rows_of
from kfqn_ext.extensions import SingleCalls, measuring, read_inputs
from kfqn_ext.optim.groups.plan import Layer
from kfqn_ext.optim.inverses.base import Kind, Measured
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import checks
from kfqn_ext.optim.passes.draws import Draws
from kfqn_ext.optim.passes.gradient_watch import GradientWatch
from kfqn_ext.optim.passes.listening import Listening
from kfqn_ext.optim.passes.measurement import Measurement, Probes, Results
from kfqn_ext.optim.passes.ranks import Directions, OneProcess, Pool, Ranks, seed_of
from kfqn_ext.optim.passes.ranks.weights import OF_A_MEAN, OF_A_SUM, OF_BATCHES
from kfqn_ext.optim.passes.reading import Reading
from kfqn_ext.optim.passes.replay import Replay
from kfqn_ext.optim.passes.warm_start import measure_data
from kfqn_ext.optim.recipe import Recipe, SecondPass

Normalizers = dict[nn.Module, nn.Module]
Wanted = Mapping[Kind, Sequence[nn.Module]]


class Passes:
    """Runs and measures passes over a model's minibatches.

    Attributes:
        ranks: The processes that train together; they pool what each has measured.
        listening: What passes have shown that nobody announced.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, loss_reduction: str, fraction: float, ranks: Ranks | None = None
    ) -> None:
        """Prepare to measure what a recipe needs.

        Args:
            model: The model.
            recipe: The row of the table.
            loss_reduction: "mean" or "sum": what the loss does over the data of a batch.
            fraction: Of each minibatch, in (0, 1], what curvature is learned from.
            ranks: The processes that train together; None for this one.
        """
        self.ranks: Ranks = OneProcess() if ranks is None else ranks
        self._weights = OF_A_MEAN if loss_reduction == "mean" else OF_A_SUM
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
        self._other_draws = LateWarning(
            "A second pass drew other random numbers than the first, as other dropout masks; nothing was learned from "
            "the two. torch's generators are the process's: other threads may draw meanwhile. Let a lock keep them "
            "apart, from the first pass to the end of the second, or give each a process. What is not the model's is "
            "drawn outside of both passes."
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
            results.draws = Draws() if self._compares else None
        with (
            self.listening.paused(),
            nullcontext() if results.reading is None else read_inputs(results.reading),
            nullcontext() if results.draws is None else results.draws.watch(self._model),
            measuring(measurement.extensions),
        ):
            yield results
        checks.first_pass(measurement, gradients, alone=not self.ranks.several)
        if results.reading is not None:
            self._replay.look_for_writes()
            if self._fraction < 1:
                self._replay.look_for_draws()
                self._has_other_rows |= len(results.reading.rows) > 1
        results.update(measurement.results())

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
            pools=self.ranks.pool is not None,
        )

    def pool_first(
        self, first: Results, directions: Directions, normalizers: Normalizers | None
    ) -> tuple[Results, Normalizers | None]:
        """What the first pass has shown on all ranks, and what one of them alone has found out, agreed on.

        Args:
            first: What it has shown here.
            directions: Chooses those in which A and Γ are looked at.
            normalizers: What was found to normalize a layer's output; None where nobody looked.

        Returns:
            Both, as all ranks know them.

        Raises:
            ValueError: If no rank has a datum.
        """
        pool = self.ranks.pool
        if pool is None or not first:
            return first, normalizers
        replay = self._replay
        mine = [float(replay.drew), float(self._has_other_rows), float(not replay.is_exact)]
        said = [*mine, *self._said_of(first, normalizers or {})]
        whole, said = pool.pooled(first, self._weights, said, without={"h_bar"})
        if not whole:
            raise ValueError("The batches of all ranks are empty: there is no datum to learn from. Drop empty batches.")
        (drew, rows, inexact), rest = said[:3], said[3:]
        replay.drew, self._has_other_rows, replay.is_exact = drew > 0, rows > 0, inexact == 0
        agreed = None if normalizers is None else self._agreed(first, rest)
        return pool.probed(first, whole, self._weights, directions), agreed

    def _said_of(self, first: Results, normalizers: Normalizers) -> list[float]:
        """For each layer: whether it saw data here, whether a normalization was found there, and the number of it."""
        numbers = {module: float(n) for n, module in enumerate(self._model.modules(), 1)}
        seen = [any(q.num_data for q in measured) for measured in first.values()]
        found = [
            numbers[normalizers[m]] if saw and m in normalizers else 0.0 for m, saw in zip(first, seen, strict=True)
        ]
        return [*map(float, seen), *(float(n > 0) for n in found), *found]

    def _agreed(self, first: Results, said: Sequence[float]) -> Normalizers:
        """The normalizations that all ranks with data of a layer have found, from the sums of what they said."""
        modules, size = list(self._model.modules()), len(first)
        sums = zip(first, said[:size], said[size : 2 * size], said[2 * size :], strict=True)
        return {m: modules[round(number / ranks) - 1] for m, ranks, finders, number in sums if 0 < ranks == finders}

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
        results, reading, draws = Results(), Reading(1.0), Draws()
        probes = Probes(A=lambda module, a_bar: None)
        pool, asked = self.ranks.pool, (wanted, self._loss_reduction, probes, loss_scale)
        measurement = Measurement(*asked, of_grad=True, pools=pool is not None)
        with (
            checks.reaching(layers, measurement),
            self.ranks.alone(),
            read_inputs(reading),
            self._replay.repeat([layer.module for layer in layers]),
            draws.watch(self._model),
            measuring(measurement.extensions, alone=True),
        ):
            yield results
        checks.second_pass(layers, measurement)
        same_data = results.repeats if first.reading is None else first.reading.agrees_with(reading)
        same_draws = first.draws is None or first.draws.agree_with(draws)
        found = measurement.results()
        other_data, other_draws = ~same_data, _on_host(not same_draws)
        results.repeats = same_data if same_draws else _on_host(False)
        if pool is not None:
            found, other_data, other_draws = self._pool_second(pool, found, first, other_data, not same_draws)
            results.repeats = ~(other_data | other_draws)
        self._other_data.note(other_data)
        self._other_draws.note(other_draws)
        if pool is not None or self._replay.is_exact:
            results.update(found)

    def _pool_second(
        self, pool: Pool, found: Results, first: Results, other_data: Tensor, other_draws: bool
    ) -> tuple[Results, Tensor, Tensor]:
        """What the second pass has shown on all ranks; whether one had other data, or other random numbers."""
        has_rows = self.ranks.rows is not None  # then h̄ follows from ā, as in the first pass
        without, said = {"h_bar" if has_rows else "a_bar"}, (float(other_draws), float(not self._replay.is_exact))
        if self._compares:
            whole, told = pool.repeated(found, first, self._weights, said, (other_data,), without)
            draws, data = told[0] > 0, (told[1:] > 0).any()
        else:
            whole, sums = pool.pooled(found, self._weights, said, (other_data,), without)
            draws, data = _on_host(sums[0] > 0), _on_host(sums[2] > 0)
            whole = whole.like({} if sums[1] else whole)
        return pool.outputs(whole), data, draws

    def over_data(
        self,
        layers: Sequence[Layer],
        loader: Iterable[Any],
        forward: Callable[[Any], Any] | None,
        progress: bool,
    ) -> Results:
        """Measure what makes the initial curvature, over a data set; see :func:`measure_data`.

        Raises:
            ValueError: If no process has a batch, no layer was measured, or ``forward`` is needed and missing.
        """
        bar = tqdm(loader, desc="warm start", disable=not progress or self.ranks.rank > 0, leave=False)
        batches = self.ranks.in_step(bar, like=rows_of(layers[0].weight.detach()))
        seeds = map(partial(seed_of, self.ranks.rank), count())  # each batch has targets of its own
        results, number = measure_data(self._model, layers, self._recipe, self._loss_reduction, batches, forward, seeds)
        if self.ranks.pool is not None:
            results, number = self._pool_data(self.ranks.pool, layers, results, number)
        if number == 0:
            raise ValueError(
                "warm_start: the loader has no batch. A list or a DataLoader works; a used-up iterator doesn't."
            )
        if not results:
            raise ValueError(
                "warm_start: no layer was measured in any batch, so that no curvature was made. A forward of your own "
                "must call the model and, where it is asked for gradients, run loss.backward()."
            )
        return results

    def _pool_data(self, pool: Pool, layers: Sequence[Layer], results: Results, count: int) -> tuple[Results, int]:
        """Averages over the data of all ranks, and how many batches they had."""
        complete = {}
        for layer in layers:
            found, kinds = results.get(layer.module, Measured()), self._recipe.at(layer.geometry.d_in).starts_from
            extensions = [kind(reduction=self._loss_reduction) for kind in sorted(kinds, key=str)]
            complete[layer.module] = Measured(
                {type(k): k.absent(layer.module) if (q := found.get(type(k))) is None else q for k in extensions}
            )
        whole, (of_all,) = pool.pooled(Results(complete), OF_BATCHES, [count])
        return whole, round(of_all)


def _on_host(flag: bool) -> Tensor:
    return torch.tensor(flag, device="cpu")
