"""The two passes over a minibatch: what they measure, when the second is due, and what it teaches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from backpack import backpack
from backpack.context import CTX
from torch import Tensor, nn

from kfqn_ext.optim import blocks, checks
from kfqn_ext.optim.gradient_watch import GradientWatch
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.learner import LearningOptimizer
from kfqn_ext.optim.measure import Measurement
from kfqn_ext.optim.planned import Work
from kfqn_ext.optim.recipe import Recipe, SecondPass
from kfqn_ext.optim.replay import Replay
from kfqn_ext.optim.shifts import Normalizers

NEVER_RAN = "A second pass was due and never ran: curvature was not updated. See second_pass_due."


class TwoPassOptimizer(LearningOptimizer):
    """Measures one or two passes over each minibatch, around a step that others take."""

    def __init__(
        self, model: nn.Module, params: Any, recipe: Recipe, defaults: dict[str, Any], reduction: str, share: float
    ) -> None:
        """See :class:`LearningOptimizer`; ``share`` is the part of a minibatch that curvature is learned from."""
        self._replay = Replay(model)
        self._share = share
        self._part = share  # of this minibatch, for the pairs of both passes
        self._first: Measurement | None = None
        self._stepped = False  # since the first pass
        self._due: Work = []
        self._loss: Tensor | None = None  # of this minibatch, where the step depends on it
        self._was_finite = torch.tensor(True, device="cpu")  # the minibatch of the last step, bool []
        self._normalizers_seen: Normalizers | None = None
        self._bad_second_passes = LateWarning("A second pass was not finite; nothing was learned from it.")
        super().__init__(model, params, recipe, defaults, reduction)

    # ------------------------------------------------------------------ the first

    @contextmanager
    def first_pass(self, loss_scale: float | None = None, keep_inputs: bool = False) -> Iterator[None]:
        """Measure the forward and backward pass in the body, for loops that cannot pass a closure to ``step``.

        Several backward passes in the body accumulate, as ``.grad`` does: over micro-batches whose losses are scaled to
        shares of the whole batch's, or over several losses of one forward pass. Auxiliary passes belong outside.

        Args:
            loss_scale: What the loss is multiplied with before ``backward()``, for example
                ``GradScaler.get_scale()``; ``.grad`` must be unscaled before ``step``. Required with float16.
            keep_inputs: Hold the layers' inputs until ``step``, so that micro-batches give what one big batch gives.
                Without it the direction s = H_A ā in which A is looked at comes from the first of them.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If the body runs no backward pass, or one in float16 without a ``loss_scale``; on a wrapper.
            NotImplementedError: In several processes.
            ValueError: If all batches are empty, or a schedule has left its range.
        """
        checks.surroundings(self)
        self._begin()
        trained = [(layer, group) for layer, group in self._layers() if layer.weight.requires_grad]
        due = {layer.module for layer, group in trained if self._is_due(group)}
        fresh = {layer.module for layer, _ in trained if not blocks.is_started(self.state.get(layer.weight))}
        measurement = self._measurement(due, fresh, loss_scale, None if keep_inputs else self._probe)
        gradients = self._watch_gradients()
        repeats = self.recipe.second_pass is not SecondPass.NONE and bool(due or fresh)
        if repeats:
            self._replay.record()
        extensions = (*CTX.get_active_exts(), *measurement.extensions)
        with (
            backpack(*extensions, extension_hook=CTX.get_extension_hook()),
            self._look_for_normalizers(due) as self._normalizers_seen,
        ):
            yield
        if not gradients.changed:
            raise RuntimeError("No gradient changed in the first pass: it must run loss.backward().")
        checks.first_pass(measurement)
        if repeats and self._share < 1:
            self._replay.look_for_draws()
        self._first = measurement
        now = self._due_at_once(due, fresh)
        self._due = [
            (layer, group) for layer, group in trained if layer.module in now and layer.weight.grad is not None
        ]

    def _begin(self) -> None:
        """Leave the minibatch before behind."""
        self._forget_empty_state()
        self._follow_parameters()
        if self._due:
            self._warn_once(NEVER_RAN)
        self._due, self._first, self._loss, self._stepped = [], None, None, False
        self._rejected.clear()
        self._apply_schedules()
        self._spare()
        self._part = self._pair_share()

    def _measurement(
        self, due: set[nn.Module], fresh: set[nn.Module], loss_scale: float | None, probe: Any
    ) -> Measurement:
        wanted = {kind: due for kind in blocks.first_kinds(self.recipe)}
        for kind in blocks.start_kinds(self.recipe) - {"factors"}:
            wanted[kind] = wanted.get(kind, set()) | fresh
        return Measurement(wanted, self._reduction, probe, loss_scale, (self._part, self._share), self._spared)

    def _due_at_once(self, due: set[nn.Module], fresh: set[nn.Module]) -> set[nn.Module]:
        """Layers that a second pass on sampled targets is to measure before the step."""
        if not self.recipe.second_pass.sampled:
            return set()
        return fresh | due if self.recipe.second_pass is SecondPass.SAMPLED_BEFORE_STEP else fresh

    def _watch_gradients(self) -> GradientWatch:
        return GradientWatch(p for group in self.param_groups for p in group["params"])

    def _pair_share(self) -> float:
        """Share of the minibatch that the second pass runs, and that the first pass takes to compare with it."""
        repeats = self.recipe.second_pass is SecondPass.REPEAT_AFTER_STEP
        in_part = self._share == 1 or not repeats or self._replay.repeatable_in_part
        return self._share if in_part else 1.0

    def _is_comparable(self) -> bool:
        """Whether a second pass can be compared with the first, which may have drawn random numbers for a part."""
        return self._pair_share() <= self._part

    def _finite(self) -> Tensor:
        finite = super()._finite()
        return finite if self._loss is None else finite & torch.isfinite(self._loss).to(finite.device)

    # ------------------------------------------------------------------ the second

    @property
    def second_pass_due(self) -> bool:
        """Whether a second pass over the minibatch is wanted now, inside ``second_pass()``.

        Most recipes want it after ``step``, on the same targets; KFAC before, on sampled targets.
        """
        return bool(self._due)

    @property
    def second_pass_layers(self) -> list[nn.Module]:
        """The layers that a second pass is due for; below the first of them it needs no gradient."""
        return [layer.module for layer, _ in self._due]

    @contextmanager
    def second_pass(self, loss_scale: float | None = None) -> Iterator[None]:
        """Repeat the forward and backward pass of this minibatch in the body, and learn from both passes.

        The body sees the random numbers of the first pass: those of torch's default generators, not Python's and
        NumPy's. The model's parameters get no gradient; their ``.grad`` and all buffers of the model are as before when
        it ends. Parameters outside the model, as a loss may have, get a second gradient: freeze them in the body.
        Micro-batches are all repeated, in their order.

        Args:
            loss_scale: As for :meth:`first_pass`; a scaler may have changed it meanwhile.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If no second pass is wanted, or it runs in float16 without a ``loss_scale``.
        """
        if not self._due or self._first is None:
            raise RuntimeError("second_pass() where none is wanted: check second_pass_due first.")
        due, first, self._due = self._due, self._first, []
        if self._stepped:
            self._first, finite = None, self._was_finite  # .grad may have been cleared since
        else:
            with torch.no_grad():
                finite = self._finite()
        modules = [layer.module for layer, _ in due]
        wanted = {kind: modules for kind in blocks.second_kinds(self.recipe)}
        second = Measurement(wanted, self._reduction, lambda module, a_bar: None, loss_scale)
        with checks.reaching(due, second), self._replay.repeat(modules), backpack(*second.extensions):
            yield
        checks.loss_scale(second)
        with torch.no_grad():
            self._bad_second_passes.note(second.not_finite().to(finite.device) & finite)
            self._learn(due, first, second, finite, self._step_number)
            if self.recipe.second_pass is SecondPass.SAMPLED_AFTER_STEP:
                self._refresh()

    @property
    def _step_number(self) -> int:
        """The step k whose minibatch the first pass measured; groups count the steps that were taken."""
        return int(self.param_groups[0]["step"]) + (0 if self._stepped else 1)
