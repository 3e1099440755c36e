"""The step that all members of the family share: one direction, one update, and a closure that is called twice."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import blocks, checks
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import NEVER_RAN, TwoPassOptimizer
from kfqn_ext.optim.recipe import Recipe, SecondPass
from kfqn_ext.optim.replay import left_as_it_was
from kfqn_ext.optim.schedules import Schedule

Closure = Callable[[], Tensor]


class KroneckerOptimizer(TwoPassOptimizer):
    """Steps p = H_G M H_A for each linear and convolutional layer of a model, as a recipe says.

    With M the momentum of the gradient, M ← βM + ∂W, and W = [weight, bias]::

        W ← W - α (H_G M H_A + γ W)

    Parameters without such a block take p = M at the recipe's fallback rate, and the same decay. When curvature is
    due, a second pass over the same minibatch tells the sides what they learn from.

    A batch with a gradient that is not finite, or with a ``step_cap`` and such a loss, changes neither parameters nor
    state, with one warning.

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
            lr: α ≥ 0. A function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets
                the group's value.
            damping: λ > 0, in units of the loss's second derivative.
            curvature_update_freq: T ≥ 1: the sides learn when k is a multiple of T.
            inverse_update_freq: T₂ ≥ 1: inverses that are not learned pair by pair are recomputed when k is a
                multiple of T₂.
            momentum: β in [0, 1).
            weight_decay: γ ≥ 0, decoupled from the momentum.
            step_cap: κ: shorten the step where its squared length in the preconditioned norm, α² Σ⟨p, M⟩, exceeds
                κ |f|, a share of the loss. Needs the closure's loss, a number.
            direction_dtype: dtype of the products H_G M H_A, from copies of dense inverses that are renewed when these
                change. None for the inverses' own. ``torch.bfloat16`` costs a fraction where the device has it.
            second_pass_fraction: In (0, 1]: share of the minibatch, its first data, that curvature is learned from; the
                gradient is always the whole minibatch's. Needs a loss that weights all data alike. With BatchNorm in
                training mode, or where the first pass draws random numbers, the second pass still takes the whole, and
                only A s before a normalization the part.
            reduction: "mean" or "sum": what the loss does over the data of a batch.

        Raises:
            ValueError: If a hyperparameter is out of range or the groups do not fit the layers.
            UnsupportedLayerError: If the model has no layer with a Kronecker block.
        """
        self._step_cap = step_cap
        self._bad_batches = LateWarning("A batch had a gradient, or a loss, that is not finite; it changed nothing.")
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
        super().__init__(model, params, recipe, defaults, reduction, second_pass_fraction)

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
            ValueError: If a schedule has left its range.
        """
        if closure is not None and self._first is not None and not self._stepped:
            self._expect_empty(closure)
            closure = None
        if closure is None:
            if self._first is None and self._is_asked_for_empty_state():
                self._make_empty_state()
            else:
                self._advance()
            return None
        checks.closure(closure, type(self).__name__, self.recipe.second_pass, self._pair_share())
        try:
            with torch.enable_grad(), self.first_pass():
                loss = closure()
            if self._step_cap is not None:
                self._loss = checks.loss(loss)
            self._run_second_pass(closure)
            self._advance()
            self._run_second_pass(closure)
        except Exception:
            self._first, self._due, self._loss = None, [], None  # a minibatch that failed is not waiting for its step
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

    def _run_second_pass(self, closure: Any) -> None:
        if not self.second_pass_due:
            return
        # From the global random numbers, so that a resumed run samples as the uninterrupted one; the pass itself
        # replays those of the first.
        seed = int(torch.randint(2**62, (), device="cpu")) if self.recipe.second_pass.sampled else 0
        part = closure if self._part == 1 else closure.part(self._part)
        loss_fn = getattr(closure, "loss_fn", None)  # its own parameters, where it has any, are another optimizer's
        loss_alone = left_as_it_was(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext()
        with torch.enable_grad(), self.second_pass(), loss_alone:
            if self.recipe.second_pass.sampled:
                part.sampled(seed)
            else:
                part()

    def _advance(self) -> None:
        """Move the parameters, and find out who learns and whose inverses are recomputed."""
        when = self.recipe.second_pass
        if self._due and self._stepped:
            self._warn_once(NEVER_RAN)
            self._due, self._first = [], None  # of an earlier step
        checks.gradients(self._gradients())
        if self._first is None and not self._has_curvature():
            raise RuntimeError(checks.NOTHING_MEASURED)
        if self._step_cap is not None and self._loss is None:
            raise RuntimeError("step_cap compares the step with the loss: pass a closure that returns the loss.")
        self._apply_schedules()
        finite = self._was_finite = self._finite()
        first = self._first
        if first is not None:
            self._start_from(first)
        if when.sampled:
            self._refreshing = [w for w in self._layers() if self._is_due(w[1], "inverse_update_freq")]
        if when is SecondPass.SAMPLED_BEFORE_STEP:
            self._refresh()
        self._descend(self._loss, self._step_cap, finite)
        self._loss = None
        self._bad_batches.note(~finite)
        due = [] if when is SecondPass.SAMPLED_BEFORE_STEP else [w for w in self._layers() if self._is_due(w[1])]
        if due and first is None:
            self._warn_once("step() ran without measurements when curvature was due; it was not updated.")
        elif first is not None:
            if self._normalizers_seen is not None:
                self._settle_normalized(due, self._normalizers_seen, first, finite)
            due = [w for w in due if self._is_comparable() and self._reached(w[0], first.of(w[0].module))]
            self._due = [w for w in due if blocks.second_kinds(self._recipe_of(w[0]))]
            self._learn([w for w in due if w not in self._due], first, None, finite, self._step_number)
        self._stepped = True
        if not self._due:
            self._first = None
            self._refresh()
        for group in self.param_groups:
            group["step"] += 1
