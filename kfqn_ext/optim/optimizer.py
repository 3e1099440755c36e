"""The step that all members of the family share: one direction, one update, and a closure that is called twice."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, overload
from warnings import warn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from kfqn_ext._torch import accumulates_gradient_of, finder_of_gradients, is_divided, rest, rows_of
from kfqn_ext.extensions import KBFGSQuantities, LayerExtension, extend, listen
from kfqn_ext.linalg.operators import Inverses
from kfqn_ext.linalg.splits import LARGE_EPSILON, is_relative
from kfqn_ext.optim.descent import descend
from kfqn_ext.optim.groups.hyperparameters import BY_GROUP, Shared, complete, shows_all_keywords, update_freq
from kfqn_ext.optim.groups.plan import Block, Layer, Plan, make_plan
from kfqn_ext.optim.groups.repr import render
from kfqn_ext.optim.groups.schedules import Schedule, apply_schedules, take_schedules
from kfqn_ext.optim.groups.validation import check_arguments, check_group, check_split, settle
from kfqn_ext.optim.inverses.base import Direction
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.numbers import as_real, number
from kfqn_ext.optim.passes import checks
from kfqn_ext.optim.passes.gradient_watch import GradientWatch
from kfqn_ext.optim.passes.measurement import Measurement, Probes, Results
from kfqn_ext.optim.passes.passes import Passes
from kfqn_ext.optim.passes.ranks import Chosen, OneProcess, ranks_of, seed_of
from kfqn_ext.optim.passes.snapshot import left_as_it_was
from kfqn_ext.optim.preconditioner import checkpoint
from kfqn_ext.optim.preconditioner.block import empty_other, is_empty, is_started, leave_to_another, start_empty
from kfqn_ext.optim.preconditioner.diagnostics import Diagnostics, diagnose
from kfqn_ext.optim.preconditioner.normalized import Normalizers
from kfqn_ext.optim.preconditioner.operators import inverses
from kfqn_ext.optim.preconditioner.owners import Owners
from kfqn_ext.optim.preconditioner.preconditioner import Preconditioner
from kfqn_ext.optim.recipe import Recipe, SecondPass

Closure = Callable[[], Tensor]
"""Clears gradients, runs a forward and a backward pass over one minibatch, and returns the loss."""
_NEVER_RAN = "A second pass was due and never ran: curvature was not updated. See second_pass_due."
# What a closure raises that looks at gradients, which a second pass does without as long as it can.
_NO_GRADIENT = (AttributeError, TypeError, AssertionError, ValueError, RuntimeError)


@dataclass(eq=False)
class Iteration:
    """One minibatch on its way through a step; dropped when it is done.

    Attributes:
        k: The number of its step, from 1.
        first: What the first pass measured.
        fraction: Of the minibatch, what a second pass has to run.
        normalizers: What the network was found to normalize, where it was looked at.
        due: Layers that a second pass is wanted for, now.
        loss: Where the step depends on it.
        finite: Whether the gradients were, bool [], once the step is taken.
        inverting: Layers whose inverses are recomputed when it is done.
        rejected: Layers that were measured, but not finite.
    """

    k: int
    first: Results
    fraction: float
    normalizers: Normalizers | None = None
    due: list[Layer] = field(default_factory=list)
    loss: Tensor | None = None
    finite: Tensor | None = None
    inverting: list[Layer] = field(default_factory=list)
    rejected: set[Layer] = field(default_factory=set)

    @property
    def stepped(self) -> bool:
        """Whether the parameters have moved."""
        return self.finite is not None


@shows_all_keywords
class KroneckerOptimizer(Optimizer):
    """Steps p = H_G M H_A for each linear and convolutional layer of a model, as a recipe says.

    With M the momentum of the gradient, M ← βM + ∂W, and W = [weight, bias]::

        W ← W - α (H_G M H_A + γ W)

    The recipe may set the length of a layer's step in place of α ‖H_G M H_A‖. Parameters without such a block move by
    another of its rules, with the same decay. When curvature is due, a second pass over the same minibatch tells H_A
    and H_G what they learn from.

    A batch with a gradient that is not finite, or with a ``step_cap`` and such a loss, changes neither parameters nor
    state, with one warning.

    State per layer, under its weight: ``momentum`` [*B, d_out, d_in] and what the inverses keep (``H_A``, ``H_G``, …),
    in the weight's dtype, float32 at least. Where another process keeps these, ``num_locations`` alone is a mark.
    """

    recipe: Recipe
    _update_freq = "curvature_update_freq"  # what a group calls T
    _plan: Plan | None = None  # until torch's constructor has taken the groups

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
        **shared: Unpack[Shared],
    ) -> None:
        """Plan the treatment of every parameter, then extend the model.

        Args:
            model: The model; :func:`kfqn_ext.extend` is called on it.
            params: Parameters or groups of them, as for any ``torch.optim`` optimizer; all of the model's if None.
                Weight and bias of a layer may be in two groups that differ in ``weight_decay`` alone.
                Every hyperparameter but ``step_cap``, ``second_pass_fraction`` and ``reduction`` can be set by group.
            recipe: The row of the table.
            lr: α ≥ 0. A function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets
                the group's value.
            damping: λ > 0, in units of the loss's second derivative; with the split ``relative`` it is ε > 0, in units
                of each factor's mean eigenvalue.
            curvature_update_freq: T ≥ 1: the inverses learn when k is a multiple of T.
            inverse_update_freq: T₂ ≥ 1: inverses that are not learned pair by pair are recomputed when k is a
                multiple of T₂.
            momentum: β in [0, 1).
            **shared: As follows.
            weight_decay: γ ≥ 0, decoupled from the momentum.
            step_cap: κ, in the paper's forms, where the length of a step is not set: shorten the step where its squared
                length in the preconditioned norm, α² Σ⟨p, M⟩, exceeds κ |f|, a share of the loss. Needs the closure's
                loss, a number.
            direction_dtype: dtype of the products H_G M H_A, from copies of dense inverses that are renewed when these
                change. None for the inverses' own. ``torch.bfloat16`` costs a fraction where the device has it.
            second_pass_fraction: In (0, 1]: fraction of the minibatch, its first data, that curvature is learned from;
                the gradient is always the whole minibatch's. Needs a loss that weights all data alike. With BatchNorm
                in training mode, or where the first pass draws random numbers, the second pass still takes the whole,
                and only A s before a normalization the part.
            reduction: "mean" or "sum": what the loss does over the data of a batch.
            process_group: The processes that train copies of the model together, where ``model`` is no
                ``DistributedDataParallel`` and holds none; a group of one for a training of its own. A model of
                ``fully_shard`` says it.
            shard_state: Divide the state among these processes: each layer has an owner, which alone keeps H_A, H_G and
                momentum, and learns. All get its step, as long as the gradient. A single process owns everything. Under
                ``fully_shard`` the state is always divided.

        Raises:
            ValueError: If a hyperparameter is out of range, or weight and bias of a layer are in two groups that differ
                in more than ``weight_decay``, or this recipe can't share its state.
            UnsupportedLayerError: If the model has no layer with a Kronecker block, or is divided among processes in
                another way than by ``fully_shard`` over one group.
            TypeError: If ``model`` is no ``nn.Module``, or ``params`` holds anything but parameters.
        """
        check_arguments(model, params, type(self).__name__)
        options = complete(type(self).__name__, shared)
        step_cap, fraction = (number(options[k]) for k in ("step_cap", "second_pass_fraction"))
        reduction = options["reduction"]
        model, ranks = ranks_of(model, options["process_group"])
        checks.options(step_cap, fraction, recipe)
        is_shared = options["shard_state"] or ranks.rows is not None
        owners = Owners(recipe, ranks if is_shared else OneProcess(), ranks.rows)
        makers = owners if is_shared else Owners(recipe, ranks)
        if is_shared and ranks.several:
            checks.can_be_sharded(recipe, type(self).__name__, ranks.rows is not None)
        KBFGSQuantities(reduction=reduction)  # raises on a wrong reduction, before the model is extended
        defaults = {
            "lr": lr,
            "damping": damping,
            self._update_freq: curvature_update_freq,
            "inverse_update_freq": inverse_update_freq,
            "momentum": momentum,
            **{key: options[key] for key in BY_GROUP},
            "step": 0,
            "layout": checkpoint.layout(recipe),
        }
        super().__init__(list(model.named_parameters()) if params is None else params, defaults)
        self.recipe = recipe
        self._model = model
        self._step_cap: float | None = step_cap
        self._iteration: Iteration | None = None
        self._state_is_empty = False  # its tensors have names and shapes, but were never measured
        self._warned: set[Hashable] = set()
        self._bad_batches = LateWarning("A batch had a gradient, or a loss, that is not finite; it changed nothing.")
        self._bad_second_passes = LateWarning("A second pass was not finite; nothing was learned from it.")
        self._passes = Passes(model, recipe, reduction, fraction, ranks)
        self._preconditioner = Preconditioner(recipe, self._warn_once, owners, makers)
        self._schedules = [take_schedules(group, 0) for group in self.param_groups]
        for group in self.param_groups:
            check_group(group)
            self._remark_on_damping(group)
        self._plan = self._make_plan()
        self._extend()

    @classmethod
    def as_printed(cls, *args: Any, **keywords: Any) -> Self:
        """Build the method as its paper prints it; where a class has no other form, this is its constructor."""
        return cls(*args, **keywords)

    # ------------------------------------------------------------------ the step

    @overload  # type: ignore[override]  # torch's own closures return a float; a tensor spares the host from waiting
    def step(self, closure: Closure) -> Tensor: ...

    @overload
    def step(self, closure: None = None) -> None: ...

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:
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
        if closure is None and self._is_asked_for_empty_state():
            self._make_empty_state()
            return None
        if closure is not None and self._was_measured(closure):
            closure = None
        if closure is not None:
            checks.closure(closure, type(self).__name__, self.recipe.second_pass, self._passes.fraction)
        try:
            if closure is not None:
                return self._step_with(closure)
            self._take_heard()
            self._advance()
        except BaseException:  # Ctrl-C among them
            self._iteration = None  # a minibatch that failed is not waiting for its step
            raise
        return None

    def _step_with(self, closure: Closure) -> Tensor:
        """Take a step with the passes that it takes, and return the loss of the first."""
        with torch.enable_grad():
            loss = self._evaluate(closure)
        self._note_loss(loss)
        self._repeat(closure)  # with targets that the model samples, where the step is to use them
        self._advance()
        self._repeat(closure)  # "another forward-backward pass over M_k"
        return loss

    def _evaluate(self, closure: Closure) -> Tensor:
        """Run the first pass. Where one pass tells all, it may be the last of several: a trainer runs them itself."""
        if self.recipe.second_pass is not SecondPass.NONE:
            with self.first_pass():
                loss = closure()
            assert self._iteration is not None
            checks.own_forward_pass(self._iteration.first)
            return loss
        gradients = GradientWatch(p for group in self.param_groups for p in group["params"])
        loss = closure()
        measurement, alone = self._passes.listening.measurement(self._begin_listening), not self._passes.ranks.several
        checks.first_pass(measurement, gradients, alone)
        self._take_heard()
        return loss

    def _advance(self) -> None:
        """The lines of ``algo_8`` between the two passes: move the parameters, and find out who learns."""
        it, blocks, samples_first = self._ready(), self._blocks(), self.recipe.second_pass.is_before_step
        grad_norms = self._grad_norms()
        if it is not None:
            self._agree(it, grad_norms)
        finite = self._finite(grad_norms, it)
        inverting = [b for b in blocks if is_due(b, "inverse_update_freq")]
        if it is not None and not self.recipe.starts_in_second_pass:
            it.rejected = self._start(blocks, it.first)  # k = 1: H_A = (A + λ_A I)⁻¹, H_G = λ_G⁻¹ I
        if samples_first:
            self._preconditioner.update_inverses(inverting)  # line_11 of algo_1
        # M ← βM + ∂W; p = H_G M H_A; W ← W - α p, line_14
        plan, limit = self._planned, self._limit(it)
        learner = self._preconditioner
        descend(
            self.param_groups, self.state, plan, self.recipe, self._direction, grad_norms, finite, limit, learner.owners
        )
        if it is not None:
            it.finite, it.inverting = finite, [b.layer for b in inverting]
        if not samples_first:
            self._learn_from_first([b for b in blocks if is_due(b)], it, finite)  # k ≡ 0 (mod T)
        if it is None or not it.due:
            self._iteration = None
            if not samples_first:
                self._preconditioner.update_inverses(inverting)
        self._bad_batches.note(~finite)
        for group in self.param_groups:
            group["step"] += 1

    def _agree(self, it: Iteration, grad_norms: Mapping[Tensor, Tensor]) -> None:
        """Make of what this process has found what all have."""
        ranks = self._passes.ranks
        if not ranks.several:
            return
        if it.first:
            ranks.check_gradient(torch.linalg.vector_norm(torch.stack([n.double() for n in grad_norms.values()])))
        it.first, it.normalizers = self._passes.pool_first(it.first, self._directions, it.normalizers)
        it.loss = None if it.loss is None else ranks.mean(it.loss)

    def _ready(self) -> Iteration | None:
        """The minibatch that this step is of; None for one that nothing was measured of."""
        self._check_places()
        it = self._iteration
        if it is not None and it.stepped:
            self._warn_once(_NEVER_RAN)
            it = self._iteration = None
        lacks_loss = self._step_cap is not None and (it is None or it.loss is None)
        has_curvature = it is not None or self._has_curvature() or not self._needs_curvature()
        checks.step(self._parameters(), has_curvature, lacks_loss)
        checks.averaged(self._gradients(), self._passes.ranks.rows is not None)
        self._apply_schedules()
        return it

    def _learn_from_first(self, due: Sequence[Block], it: Iteration | None, finite: Tensor) -> None:
        """Learn what the first pass alone can teach, and note who needs the second."""
        if it is None:
            if any(b.layer.weight.grad is not None for b in due):
                self._warn_once("step() ran without measurements when curvature was due; it was not updated.")
            return
        learner = self._preconditioner
        if it.normalizers is not None:
            learner.normalized.settle(due, it.normalizers, it.first, finite)
        comparable = self._passes.can_compare(it.fraction)
        due = [b for b in due if comparable and learner.reached(b, it.first)]
        it.due = [b.layer for b in due if learner.recipe_of(b).second]
        learner.learn([b for b in due if b.layer not in it.due], it.first, Results(), finite, it.k)

    def _direction(self, layer: Layer, group: dict[str, Any], M: Tensor) -> Tensor | None:
        """P = H_G M H_A; None where a layer moves along M."""
        block = Block(layer, group, self.state[layer.weight])
        P = None if layer.weight.grad is None else self._preconditioner.direction(block, M)
        if P is None and (self._iteration is None or layer not in self._iteration.rejected):
            self._warn_once(
                f"Layer {layer.name} has a gradient but was not measured (called through F.linear, or its weight "
                "multiplied outside of it too, or called with other weights or settings, or without a datum, compiled "
                "before it was extended, or its weight frozen?); it moves by "
                f"{self.recipe.others.title}, as others do."
            )
        return P

    def _limit(self, it: Iteration | None) -> Tensor | None:
        """κ |f|, what the squared length of the step may be; None for no limit."""
        if self._step_cap is None or it is None or it.loss is None:
            return None
        return self._step_cap * it.loss.abs()

    def _note_loss(self, loss: Any) -> None:
        if self._step_cap is not None and self._iteration is not None:
            self._iteration.loss = checks.loss(loss)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _grad_norms(self) -> dict[Tensor, Tensor]:
        """‖∂p‖_F of each parameter that has a gradient, [], in float32 at least."""
        # The Euclidean norm: on a CPU it costs a twentieth of the largest entry.
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = [as_real(rows_of(grad)) for grad in self._gradients()]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        norms = self._preconditioner.owners.norms(torch._foreach_norm(grads, 2, dtype))
        return dict(zip(parameters, norms, strict=True))

    def _finite(self, grad_norms: Mapping[Tensor, Tensor], it: Iteration | None) -> Tensor:
        """Whether all gradients are finite, and small enough to be squared, and the loss is, bool []."""
        norms = list(grad_norms.values())
        finite = torch.isfinite(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
        loss = None if it is None else it.loss
        return finite if loss is None else finite & torch.isfinite(loss).to(finite.device)

    # ------------------------------------------------------------------ the passes

    @contextmanager
    def first_pass(self, loss_scale: float | None = None, keep_inputs: bool = False) -> Iterator[None]:
        """Measure the forward and backward pass in the body, for loops that cannot pass a closure to ``step``.

        Several backward passes in the body accumulate, as ``.grad`` does: over micro-batches whose losses are scaled to
        shares of the whole batch's, or over several losses of one forward pass. Auxiliary passes belong outside.

        Args:
            loss_scale: What the loss is multiplied with before ``backward()``, for example
                ``GradScaler.get_scale()``; ``.grad`` must be unscaled before ``step``. Required with float16.
            keep_inputs: Hold the layers' inputs in the body, so that micro-batches give what one big batch gives.
                Without it the direction s = H_A ā in which A is looked at comes from the first of them.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If the body runs no backward pass, or one in float16 without a ``loss_scale``; on a wrapper.
            NotImplementedError: In several processes.
            ValueError: If all batches are empty, or a schedule has left its range.
        """
        checks.wrapper(self)
        self._check_places()
        checks.processes(self, self._passes.ranks.is_chosen)
        self._begin()
        trained, due, fresh = self._trained()
        learner, fraction = self._preconditioner, self._passes.fraction
        parameters = self._parameters()
        wanted, probes = learner.wanted_first(due, fresh), self._probes(keep_inputs)
        with (
            self._passes.first(wanted, probes, parameters, loss_scale, may_repeat=bool(due or fresh)) as first,
            learner.normalized.look(self._model, due) as normalizers,
        ):
            yield
        now = {SecondPass.SAMPLED_BEFORE_STEP: [*due, *fresh], SecondPass.SAMPLED_AFTER_STEP: fresh}
        pending = {b.layer for b in now.get(self.recipe.second_pass, []) if b.layer.weight.grad is not None}
        ordered = [b.layer for b in trained if b.layer in pending]
        self._iteration = Iteration(self.param_groups[0]["step"] + 1, first, fraction, normalizers, ordered)

    def _begin(self) -> None:
        """Leave the minibatch before behind."""
        checks.hooks(self._planned.layers.values(), type(self).__name__)
        self._forget_empty_state()
        self._follow_parameters()
        if self.second_pass_due:
            self._warn_once(_NEVER_RAN)
        self._iteration = None
        self._apply_schedules()

    def _check_places(self) -> None:
        """Raise a RuntimeError where the model trains other parameters than those that are optimized."""
        rest(self._model)  # what was gathered is none; and the next pass would run with it, whatever has moved since
        self._planned.check_places()

    def _trained(self) -> tuple[list[Block], list[Block], list[Block]]:
        """Layers whose weight is trained; of these, those that are to learn, and those without curvature."""
        trained = [b for b in self._blocks() if b.layer.weight.requires_grad]
        due = [b for b in trained if is_due(b)]
        self._preconditioner.normalized.begin(bool(due))
        return trained, due, [b for b in trained if not is_started(b)]

    def _probes(self, keep_inputs: bool = False) -> Probes:
        return Probes(self._probe_A, self._probe_G, keep_inputs, self._preconditioner.late_G)

    def _probe_A(self, module: nn.Module, a_bar: Tensor) -> Direction | None:
        weight: Any = module.weight
        return self._preconditioner.probe_A(self.state.get(weight, {}), a_bar, self.param_groups[0]["step"] + 1)

    def _directions(self, first: Results) -> dict[nn.Module, Chosen]:
        return self._preconditioner.directions(self._blocks(), first, self.param_groups[0]["step"] + 1)

    def _probe_G(self, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        weight: Any = module.weight
        return self._preconditioner.probe_G(self.state.get(weight, {}), self.param_groups[0]["step"] + 1)

    def _listen(self, module: nn.Module) -> Sequence[LayerExtension[Any]]:
        """What the backward pass that runs is to measure of a layer, where nobody has announced it.

        It counts where it adds to the layer's ``.grad``, from which the next step will come: no evaluation does, and no
        ``autograd.grad``. Several passes accumulate, as ``.grad`` does.
        """
        listening = self._passes.listening
        if listening.is_idle or listening.is_paused or self._iteration is not None:
            return ()
        held: Any = module.weight
        weight = self._planned.weights.get(module)
        if weight is None or not (weight is held or is_divided(weight)) or not accumulates_gradient_of(held):
            return ()
        return listening.measurement(self._begin_listening).extensions

    def _begin_listening(self) -> Measurement:
        has_rows = self._passes.ranks.rows is not None
        if not has_rows:  # else the layers of the pass that runs have gathered weights
            self._check_places()
        self._begin()
        _, due, fresh = self._trained()
        wanted = self._preconditioner.wanted_first(due, fresh)
        measurement = self._passes.measurement(wanted, self._probes())
        if has_rows:
            has_gradient = finder_of_gradients(self._model)
            for ext in measurement.extensions:
                ext.has_gradient = has_gradient
        return measurement

    def _take_heard(self) -> None:
        """Make the minibatch of what was heard, where no other is waiting for its step."""
        checks.hooks(self._planned.layers.values(), type(self).__name__)
        heard = self._passes.listening.take()
        if heard is not None and self._iteration is None:
            checks.processes(self, self._passes.ranks.is_chosen)
            checks.loss_scale(heard)
            self._iteration = Iteration(self.param_groups[0]["step"] + 1, heard.results(), self._passes.fraction)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, see ``torch.optim.Optimizer``, and forget what was measured with them.

        So does whoever clears a layer's gradients in another way, as ``model.zero_grad()``: a minibatch that is dropped
        without a step, as after a loss of NaN, teaches nothing. Where they are set to zero in place, the next pass that
        reaches the layer notices.
        """
        self._passes.listening.forget()
        super().zero_grad(set_to_none)

    @property
    def second_pass_due(self) -> bool:
        """Whether a second pass over the minibatch is wanted now, inside ``second_pass()``.

        Most recipes want it after ``step``, on the same targets; KFAC before, on sampled targets.
        """
        return bool(self.second_pass_layers)

    @property
    def second_pass_layers(self) -> list[nn.Module]:
        """The layers that a second pass is due for; below the first of them it needs no gradient."""
        return [] if self._iteration is None else [layer.module for layer in self._iteration.due]

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
        it = self._iteration
        if it is None or not it.due:
            raise RuntimeError("second_pass() where none is wanted: check second_pass_due first.")
        layers, it.due = it.due, []
        if it.stepped:
            self._iteration = None
        with torch.no_grad():  # .grad may have been cleared since the step
            finite = self._finite(self._grad_norms(), it) if it.finite is None else it.finite
        wanted = self._preconditioner.wanted_second(self._blocks(layers))
        with self._passes.second(wanted, layers, it.first, loss_scale) as second:
            yield
        with torch.no_grad():
            self._bad_second_passes.note(second.not_finite().to(finite.device) & finite)
            self._learn_from_both(self._blocks(layers), it, second, finite & second.repeats.to(finite.device))

    def _learn_from_both(self, due: Sequence[Block], it: Iteration, second: Results, finite: Tensor) -> None:
        started = [b for b in due if is_started(b)]
        it.rejected |= self._start(due, second)
        self._preconditioner.learn(started, it.first, second, finite, it.k)
        if it.stepped:
            self._preconditioner.update_inverses(self._blocks(it.inverting))

    def _was_measured(self, closure: Closure) -> bool:
        """Whether this is the closure that a trainer passes where its user passes none, after a first pass."""
        if self._iteration is None or self._iteration.stepped:
            return False
        gradients = GradientWatch(p for group in self.param_groups for p in group["params"])
        with torch.enable_grad():
            closure()
        checks.empty_closure(gradients)
        return True

    def _repeat(self, closure: Any) -> None:
        """Run the second pass with a closure, where it is due."""
        it = self._iteration
        if it is None or not it.due:
            return
        # From the global random numbers, so that a resumed run samples as the uninterrupted one; the pass itself
        # replays those of the first.
        seed = int(torch.randint(2**62, (), device="cpu")) if self.recipe.second_pass.sampled else 0
        seed = seed_of(self._passes.ranks.rank, seed)
        part = closure if it.fraction == 1 else closure.fraction(it.fraction)
        due = it.due
        try:
            self._repeat_once(part, seed)
        except _NO_GRADIENT:
            with self._passes.with_gradients():
                self._iteration, it.due = it, due
                self._repeat_once(part, seed)

    def _repeat_once(self, closure: Any, seed: int) -> None:
        loss_fn = getattr(closure, "loss_fn", None)  # its own parameters, where it has any, are another optimizer's
        loss_alone = left_as_it_was(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext()
        with torch.enable_grad(), self.second_pass(), loss_alone:
            if self.recipe.second_pass.sampled:
                closure.sampled(seed)
            else:
                closure()

    def warm_start(self, loader: Any, forward: Callable[[Any], Any] | None = None, progress: bool = True) -> None:
        """Make the initial curvature from a whole data set, as ``sec_18`` does; without it, from the first minibatch.

        A needs the layers' inputs only. A recipe that looks at Γ too, or at its size, needs ``forward``, which must run
        the backward pass: ``lambda b: Minibatch(...)()``, or ``.sampled(seed)`` where the recipe samples targets. These
        are ``KBFGS`` and ``KBFGSL`` without tuning, ``OnePassKFAC`` and ``KFAC``.
        The model runs in the mode it is in; parameters, ``.grad``, buffers and random numbers are left as they were.

        Args:
            loader: Batches; of a tuple or list, the first entry is the model's input, and a :class:`Minibatch` has all
                that is needed.
            forward: Runs the model on one batch of the loader, where the above does not fit.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: If the loader is empty, no layer was measured, or ``forward`` is needed and missing.
        """
        self._check_places()
        results = self._passes.over_data([b.layer for b in self._blocks()], loader, forward, progress)
        self._forget_empty_state()
        for layer in self._start(self._blocks(), results, again=True):
            warn(
                f"warm_start: what layer {layer.name} saw is not finite, and its curvature was not made from it; it "
                "keeps what it has, or starts from the first minibatch. Look for NaN and inf in the data.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ curvature, as it is held

    def inverses(self, weight: Tensor) -> Inverses | None:
        """H_A and H_G of the layer with this weight, to be multiplied with; None where this process has none (yet)."""
        found = [b for b in self._blocks() if b.layer.weight is weight]
        return inverses(found[0], self.recipe) if found else None

    def diagnostics(self, eigenvalues: bool = False) -> Diagnostics:
        """Describe the curvature of every layer: pairs kept, damped and skipped, dampings, leverage.

        ``print`` lays them out as a table, and ``as_dict()`` has flat names and numbers for a logger. It waits for the
        device a few times a layer, so an epoch is a better place for it than a step. Of layers whose state another
        process keeps, nothing is known here.

        Args:
            eigenvalues: Also find the extreme eigenvalues of H_A and H_G. That takes d³ operations for d inputs or
                outputs: several seconds on a CPU for a layer of 4,608 inputs.

        Returns:
            A list with one :class:`LayerDiagnostics` a layer, in the model's order.
        """
        return Diagnostics(diagnose(block, self.recipe, eigenvalues) for block in self._blocks())

    def _start(self, blocks: Sequence[Block], results: Results, again: bool = False) -> set[Layer]:
        """Make the initial curvature where there is none; return the layers of which something was not finite."""
        unstarted = [b for b in blocks if again or not is_started(b)]
        rejected = self._preconditioner.start(unstarted, results)
        for block in unstarted:
            if is_started(block):
                self.state[block.layer.weight] = block.state
        return {block.layer for block in rejected}

    def _needs_curvature(self) -> bool:
        """Whether a layer has a gradient."""
        return any(layer.weight.grad is not None for layer in self._planned.layers.values())

    def _has_curvature(self) -> bool:
        """Whether a layer has any, made from data."""
        return not self._state_is_empty and any(is_started(b) for b in self._blocks())

    def _blocks(self, layers: Sequence[Layer] | None = None) -> list[Block]:
        """Layers with their groups and states as they are now; all of them in the plan's order, or some."""
        blocks, chosen = self._planned.blocks(self.param_groups, self.state), set(layers or ())
        return blocks if layers is None else [b for b in blocks if b.layer in chosen]

    # ------------------------------------------------------------------ groups and parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example of layers that were frozen; see ``torch.optim.Optimizer``.

        Raises:
            ValueError: If a hyperparameter is out of range, or not that of the group with the rest of a layer.
        """
        if self._plan is None:
            super().add_param_group(param_group)
            return
        before, step = self._planned, self.param_groups[0]["step"]
        super().add_param_group(self._with_names(param_group))
        group = self.param_groups[-1]
        try:
            group["step"] = step
            schedules = take_schedules(group, step)
            check_group(group)
            self._remark_on_damping(group)
            self._plan = self._make_plan()
        except Exception:
            self.param_groups.pop()
            raise
        self._extend()
        self._schedules.append(schedules)
        self._forget_former_roles(before)

    def _forget_former_roles(self, before: Plan) -> None:
        """Drop the state of parameters that have another role now, and the gradients of those that have none.

        A bias joins the layer whose weight is added, and a head that was replaced is no longer the model's.
        """
        for p in before.names:
            role = self._planned.role(p)
            if role != before.role(p):
                self.state.pop(p, None)
            if role is None:
                p.grad = None  # nobody will clear it any more

    def _with_names(self, group: dict[str, Any]) -> dict[str, Any]:
        """Name the parameters of a group where those of the others have names: torch takes no mixture."""
        params = group["params"]
        if "param_names" not in self.param_groups[0] or isinstance(params, set):
            return group
        params = [params] if isinstance(params, Tensor) else list(params)
        names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        return {**group, "params": [(names.get(p, "?"), p) if isinstance(p, Tensor) else p for p in params]}

    def _extend(self) -> None:
        """Make layers ready to be measured; where one pass tells all, without being asked to."""
        extend(self._model)
        if self.recipe.second_pass is SecondPass.NONE:
            listen([layer.module for layer in self._planned.layers.values()], self._listen)

    def _remark_on_damping(self, group: dict[str, Any]) -> None:
        """Warn of a damping that is a λ of the paper's, where ε is meant."""
        if is_relative(self.recipe.split) and group["damping"] > LARGE_EPSILON:
            name = type(self).__name__ if hasattr(self, "recipe_as_printed") else "KBFGS"
            self._warn_once(
                f"damping={group['damping']} counts in units of each factor's mean eigenvalue here, so that next to "
                f"nothing is left of the curvature; 0.1 is usual. If it is λ of the paper, in units of the loss, build "
                f"{name}.as_printed(model, lr=..., damping={group['damping']})."
            )

    def _make_plan(self) -> Plan:
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        plan = make_plan(self._model, group_of, None if self._plan is None else self._plan.names)
        check_split(self.param_groups, plan.split)
        checks.hooks(plan.layers.values(), type(self).__name__)
        self._preconditioner.assign(plan.layers)
        return plan

    @property
    def _planned(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _apply_schedules(self) -> None:
        """Set scheduled values for the step that begins; again does no harm, and nothing looks further ahead."""
        apply_schedules(self.param_groups, self._schedules, self._planned.split)

    def __repr__(self) -> str:
        """Describe the hyperparameters and the treatment of every parameter."""
        treatments = self._planned.treatments
        share = self._preconditioner.owners.share(self._planned.layers)
        return render(type(self).__name__, self.param_groups, self._schedules, treatments, self.recipe, share)

    def _warn_once(self, message: str, about: Hashable = None) -> None:
        """Of each text, or about each thing."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            warn(message, stacklevel=3)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``torch.optim.Optimizer`` does, with numbers of Python's: a scheduler may set NumPy's.

        With ``shard_state`` it is this process's part, for ``torch.distributed.checkpoint``; see :meth:`gather_state`.
        """
        for group in self.param_groups:
            settle(group)
        return super().state_dict()

    def gather_state(self, rank: int = 0) -> dict[str, Any] | None:
        """Return on one process what ``state_dict`` of a single process would be; a collective, which all call.

        With ``shard_state``, ``state_dict`` is a process's own part. This loads everywhere: in one process, in copies,
        and in any number of processes that share it.

        Args:
            rank: Of the process, within its group. It needs memory for the whole; what others keep comes to its CPU.

        Returns:
            The state there, and None in all others.
        """
        state_dict, owners = self.state_dict(), self._preconditioner.owners
        parts = owners.mail.gathered(checkpoint.owned_part(state_dict, self._parameters(), self._planned, owners), rank)
        state = checkpoint.with_whole_tensors(state_dict["state"], owners, rank)
        if parts is None or self._passes.ranks.rank != rank:
            return None
        for part in parts:
            state |= part
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, as precisely as the state of these parameters is kept.

        ``torch.optim.Optimizer`` casts state to the parameter's dtype; here that is float32 at least. Where the state
        has the names of its parameters, they say whose it is; else their order does, as in torch.

        Raises:
            ValueError: If the state is of another kind of optimizer, another version's, or another model's; or one
                process's part of a sharded state, which lacks what this process is to keep.
        """
        loadable: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loadable.update(self._loadable(given))
            return loadable

        # Between the hooks of others, which may change what is given, and may look at what was loaded.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(lambda _: self._take_loaded(loadable), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _loadable(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A state dictionary in the words of this version, and in the order of these groups; raise where it is none."""
        state_dict = checkpoint.migrated(given, self.defaults)
        parameters, name, owners = self._parameters(), type(self).__name__, self._preconditioner.owners
        checkpoint.check_layout(state_dict, self.recipe, name)
        state_dict = checkpoint.in_order(state_dict, self.param_groups, self._planned.names)
        checkpoint.check_shapes(state_dict, parameters, self._planned, self.recipe)
        return checkpoint.part_of(state_dict, parameters, self._planned, owners, name)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _take_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state that torch has cast by the saved one, fitted to its parameters."""
        self._state_is_empty = False
        self._passes.listening.forget()
        self._passes.ranks.check_again()
        for saved_id, p in zip(checkpoint.saved_ids(state_dict), self._parameters(), strict=True):
            if p not in self.state:
                continue
            saved = state_dict["state"][saved_id]
            if is_empty(saved) or self._planned.role(p) is None:
                del self.state[p]
            else:
                self.state[p] = checkpoint.fitted(saved, p)
                if p not in self._planned.layers and p not in self._planned.covered:
                    self.state[p] = checkpoint.divided(self.state[p], p, self.recipe)

    def _follow_parameters(self) -> None:
        """Bring the state to where the parameters are, and to their dtype: after ``model.double()`` and its like."""
        for p in self._planned.names:
            if p in self.state and not checkpoint.is_fitted(self.state[p], p):
                self.state[p] = checkpoint.fitted(self.state[p], p)

    def _is_asked_for_empty_state(self) -> bool:
        """Whether this is ``torch.distributed.checkpoint``: a first step at rate and gradients of zero, for the keys.

        A warm-up from a rate of zero has other gradients; nothing but such a first step looks at them.
        """
        if self._iteration is not None or self.state or any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        gradients = self._gradients()
        return bool(gradients) and not any(bool(rows_of(g).any()) for g in gradients)

    def _make_empty_state(self) -> None:
        self._state_is_empty = True
        for block in self._blocks():
            if self._preconditioner.owners.owns(block.layer):
                start_empty(block, self.recipe)
            else:
                leave_to_another(block.state, 0.0)
            self.state[block.layer.weight] = block.state
        for p in [p for p in self._parameters() if p not in self.state]:
            self.state[p] = {} if p in self._planned.covered else empty_other(p, self.recipe)

    def _forget_empty_state(self) -> None:
        """Before there is curvature: of an empty state, into which nothing was loaded."""
        if self._state_is_empty:
            self.state.clear()
            self._state_is_empty = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's layers would not be those of any model."""
        raise TypeError(
            f"{type(self).__name__} belongs to its model and can't be copied or pickled alone. Copy or save "
            "model.state_dict() and optimizer.state_dict(), and build a new optimizer on the new model."
        )


def is_due(block: Block, key: str | None = None) -> bool:
    """Whether the step that begins is a multiple of T, or of another frequency in the layer's group.

    Where T does not divide k, only ``line_12`` to ``line_13`` of ``algo_8`` run.
    """
    every = update_freq(block.group) if key is None else block.group[key]
    return bool((block.group["step"] + 1) % every == 0)
