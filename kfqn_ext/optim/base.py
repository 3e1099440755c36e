"""The step loop that all members of the family share: two passes over a minibatch, one direction, one update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from backpack import backpack
from backpack.context import CTX
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities, extend
from kfqn_ext.optim import blocks, checks
from kfqn_ext.optim.gradient_watch import GradientWatch
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.learner import LearningOptimizer
from kfqn_ext.optim.measure import Measurement
from kfqn_ext.optim.planned import Work
from kfqn_ext.optim.recipe import Recipe, SecondPass
from kfqn_ext.optim.replay import Replay
from kfqn_ext.optim.schedules import Schedule
from kfqn_ext.optim.shifts import Normalizers

Closure = Callable[[], Tensor]
_NEVER_RAN = "A second pass was due and never ran: curvature was not updated. See second_pass_due."


class KroneckerOptimizer(LearningOptimizer):
    """Steps p = H_G M H_A for each linear and convolutional layer of a model, as a recipe says.

    With M the momentum of the gradient, M ← βM + ∂W, and W = [weight, bias]::

        W ← W - α (H_G M H_A + γ W)

    Parameters without such a block take p = M at the recipe's fallback rate, and the same decay. When curvature is
    due, a second pass over the same minibatch tells the sides what they learn from.

    A batch with a gradient that is not finite changes neither parameters nor state, with one warning.

    State per layer, under its weight: ``momentum`` [*B, d_out, d_in] and what the sides keep (``H_A``, ``H_G``, …),
    in the weight's dtype, float32 at least.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        recipe: Recipe,
        lr: float | Tensor | Schedule,
        damping: float | Schedule,
        curvature_update_freq: int | Schedule = 1,
        inverse_update_freq: int | Schedule = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        direction_dtype: torch.dtype | None = None,
        second_pass_fraction: float = 1.0,
        reduction: str = "mean",
    ) -> None:
        """Plan the treatment of every parameter, then extend the model.

        Args:
            model: The model; :func:`kfqn_ext.extend` is called on it.
            params: Parameters or groups of them, as for any ``torch.optim`` optimizer; all of the model's if None.
                Every hyperparameter but ``step_cap``, ``second_pass_fraction`` and ``reduction`` can be set by group.
            recipe: The row of the table.
            lr: α ≥ 0. A function of the step k = 1, 2, … makes a schedule, here and below.
            damping: λ > 0, in units of the loss's second derivative.
            curvature_update_freq: T ≥ 1: the sides learn when k is a multiple of T.
            inverse_update_freq: T₂ ≥ 1: inverses that are not learned pair by pair are recomputed when k is a
                multiple of T₂.
            momentum: β in [0, 1).
            weight_decay: γ ≥ 0, decoupled from the momentum.
            step_cap: κ: shorten the step where its squared length in the preconditioned norm, α² Σ⟨p, M⟩, exceeds
                κ |f|, a share of the loss. Needs the closure's loss.
            direction_dtype: dtype of the products H_G M H_A, from copies of dense inverses that are renewed when these
                change. None for the inverses' own. ``torch.bfloat16`` costs a fraction where the device has it.
            second_pass_fraction: In (0, 1]: share of the minibatch, its first data, that curvature is learned from; the
                gradient is always the whole minibatch's. Needs a loss that weights all data alike. With BatchNorm or
                Dropout in training mode the second pass still takes the whole, and only A s before a normalization
                the part.
            reduction: "mean" or "sum": what the loss does over the data of a batch.

        Raises:
            ValueError: If a hyperparameter is out of range or the groups do not fit the layers.
            UnsupportedLayerError: If the model has no layer with a Kronecker block.
        """
        self._step_cap = step_cap
        self._replay = Replay(model)
        self._first: Measurement | None = None
        self._stepped = False  # since the first pass
        self._due: Work = []
        self._share = second_pass_fraction
        self._normalizers_seen: Normalizers | None = None
        self._bad_batches = LateWarning("A batch had a gradient that is not finite; it changed nothing.")
        self._bad_second_passes = LateWarning("A second pass was not finite; nothing was learned from it.")
        defaults = {
            "lr": lr,
            "damping": damping,
            "curvature_update_freq": curvature_update_freq,
            "inverse_update_freq": inverse_update_freq,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "direction_dtype": direction_dtype,
        }
        if step_cap is not None and not step_cap > 0:
            raise ValueError(f"Invalid step_cap: {step_cap}. It must be positive, or None for no cap.")
        if not 0 < second_pass_fraction <= 1:
            raise ValueError(f"Invalid second_pass_fraction: {second_pass_fraction}. It must be in (0, 1].")
        KBFGSQuantities(reduction=reduction)  # raises on a wrong reduction, before the model is extended
        super().__init__(model, params, recipe, defaults, reduction)
        extend(model)

    # ------------------------------------------------------------------ the two passes

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
            ValueError: If all batches are empty.
        """
        checks.surroundings(self)
        if self._state_is_empty:  # and nothing was loaded into it
            self.state.clear()
            self._state_is_empty = False
        if self._due:
            self._warn_once(_NEVER_RAN)
        self._due, self._first, self._stepped = [], None, False
        self._rejected.clear()
        self._apply_schedules()
        trained = [(layer, group) for layer, group in self._layers() if layer.weight.requires_grad]
        due = {layer.module for layer, group in trained if self._is_due(group)}
        fresh = {layer.module for layer, _ in trained if not blocks.is_started(self.state.get(layer.weight))}
        wanted = {kind: due for kind in blocks.first_kinds(self.recipe)}
        for kind in blocks.start_kinds(self.recipe) - {"factors"}:
            wanted[kind] = wanted.get(kind, set()) | fresh
        probe = None if keep_inputs else self._probe
        self._spare()
        spared = {layer.module for layer in self._spared}
        shares = (self._pair_share(), self._share)
        measurement = Measurement(wanted, self._reduction, probe, loss_scale, shares, spared)
        gradients = self._watch_gradients()
        if self.recipe.second_pass is not SecondPass.NONE and (due or fresh):
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
        self._first = measurement
        if self.recipe.second_pass.sampled:
            reached = [(layer, group) for layer, group in trained if layer.weight.grad is not None]
            now = fresh | due if self.recipe.second_pass is SecondPass.SAMPLED_BEFORE_STEP else fresh
            self._due = [w for w in reached if w[0].module in now]

    @property
    def _step_number(self) -> int:
        """The step k whose minibatch the first pass measured; groups count the steps that were taken."""
        return int(self.param_groups[0]["step"]) + (0 if self._stepped else 1)

    def _watch_gradients(self) -> GradientWatch:
        return GradientWatch(p for group in self.param_groups for p in group["params"])

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

        The body sees the random numbers of the first pass. Parameters get no gradient; ``.grad`` and all buffers
        are as before when it ends. Micro-batches are all repeated, in their order.

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
            self._first = None
        with torch.no_grad():
            finite = self._finite()
        modules = [layer.module for layer, _ in due]
        wanted = {kind: modules for kind in blocks.second_kinds(self.recipe)}
        second = Measurement(wanted, self._reduction, lambda module, a_bar: None, loss_scale)
        try:
            with self._replay.repeat(modules), backpack(*second.extensions):
                yield
        except RuntimeError as error:
            if "does not require grad" in str(error) and second.reached_nothing:
                names = ", ".join(layer.name for layer, _ in due)
                raise RuntimeError(
                    f"The second pass called none of the layers that are due ({names}): they can't be measured where "
                    "they are used through F.linear, or were compiled before they were extended. Call the modules, or "
                    "leave these parameters to a torch.optim optimizer."
                ) from error
            raise
        checks.loss_scale(second)
        with torch.no_grad():
            self._bad_second_passes.note(second.not_finite().to(finite.device) & finite)
            self._learn(due, first, second, finite, self._step_number)
            if self.recipe.second_pass is SecondPass.SAMPLED_AFTER_STEP:
                self._refresh()
        self._apply_schedules()  # a step that ends here used its own values to the end

    # ------------------------------------------------------------------ the step

    # torch's own closures return a float; a tensor spares the host from waiting for it.
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Clears gradients, runs a forward and a backward pass over one minibatch, and returns the loss:
                a :class:`Minibatch`, or what ``torch.optim.LBFGS`` takes. It is called a second time when curvature
                is due. Without it, the backward pass must have run inside ``first_pass()``.

        Returns:
            The loss of the first call, or None without a closure.

        Raises:
            RuntimeError: If no backward pass has left a gradient, or no curvature was ever measured.
            TypeError: If targets must be sampled, or a part of the minibatch run, and the closure cannot do that.
        """
        if closure is not None and self._first is not None and not self._stepped:
            self._expect_empty(closure)
            closure = None
        if closure is None:
            if self._is_asked_for_empty_state():
                self._make_empty_state()
            else:
                self._advance(None)
            return None
        checks.closure(closure, type(self).__name__, self.recipe.second_pass, self._pair_share())
        try:
            with torch.enable_grad(), self.first_pass():
                loss = closure()
            self._run_second_pass(closure)
            self._advance(loss)
            self._run_second_pass(closure)
        except Exception:
            self._first, self._due = None, []  # a minibatch that failed is not waiting for its step
            raise
        return loss

    def _expect_empty(self, closure: Closure) -> None:
        """Call the closure that a trainer passes to ``step`` where its user passes none, after a first pass."""
        gradients = self._watch_gradients()
        with torch.enable_grad():
            closure()
        if gradients.changed:
            raise RuntimeError(
                "step(closure) after first_pass(): the minibatch was measured already, and the closure ran another "
                "backward pass. Use step() after first_pass(), or step(closure) alone."
            )

    def _is_asked_for_empty_state(self) -> bool:
        """Whether this is ``torch.distributed.checkpoint``: a first step at a rate of zero, for the state's keys."""
        return not self.state and self._first is None and all(float(group["lr"]) == 0 for group in self.param_groups)

    def _pair_share(self) -> float:
        """Share of the minibatch that the second pass runs, and that the first pass takes to compare with it."""
        repeats = self.recipe.second_pass is SecondPass.REPEAT_AFTER_STEP
        in_part = self._share == 1 or not repeats or self._replay.repeatable_in_part
        return self._share if in_part else 1.0

    def _run_second_pass(self, closure: Any) -> None:
        if not self.second_pass_due:
            return
        # From the global random numbers, so that a resumed run samples as the uninterrupted one; the pass itself
        # replays those of the first.
        seed = int(torch.randint(2**62, (), device="cpu")) if self.recipe.second_pass.sampled else 0
        share = self._pair_share()
        part = closure if share == 1 else closure.part(share)
        with torch.enable_grad(), self.second_pass():
            if self.recipe.second_pass.sampled:
                part.sampled(seed)
            else:
                part()

    def _advance(self, loss: Tensor | None) -> None:
        """Move the parameters, and find out who learns and whose inverses are recomputed."""
        when = self.recipe.second_pass
        if self._due and self._stepped:
            self._warn_once(_NEVER_RAN)
            self._due, self._first = [], None  # of an earlier step
        checks.gradients(self._gradients())
        if self._first is None and not any(blocks.is_started(self.state.get(w[0].weight)) for w in self._layers()):
            raise RuntimeError(checks.NOTHING_MEASURED)
        if self._step_cap is not None and loss is None:
            raise RuntimeError("step_cap compares the step with the loss: pass a closure that returns the loss.")
        finite = self._finite()
        self._apply_schedules()
        first = self._first
        if first is not None:
            self._start_from(first)
        if when.sampled:
            self._refreshing = [w for w in self._layers() if self._is_due(w[1], "inverse_update_freq")]
        if when is SecondPass.SAMPLED_BEFORE_STEP:
            self._refresh()
        self._descend(loss, self._step_cap, finite)
        self._bad_batches.note(~finite)
        due = [] if when is SecondPass.SAMPLED_BEFORE_STEP else [w for w in self._layers() if self._is_due(w[1])]
        if due and first is None:
            self._warn_once("step() ran without measurements when curvature was due; it was not updated.")
        elif first is not None:
            if self._normalizers_seen is not None:
                self._settle_normalized(due, self._normalizers_seen, first, finite)
            due = [w for w in due if self._reached(w[0], first.of(w[0].module))]
            self._due = [w for w in due if blocks.second_kinds(self._recipe_of(w[0]))]
            self._learn([w for w in due if w not in self._due], first, None, finite, self._step_number)
        self._stepped = True
        if not self._due:
            self._first = None
            self._refresh()
        for group in self.param_groups:
            group["step"] += 1
        if not self._due:
            self._apply_schedules()
