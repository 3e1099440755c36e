"""The step loop that all members of the family share: two passes over a minibatch, one direction, one update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from warnings import warn

import torch
from backpack import backpack
from backpack.context import CTX
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from kfqn_ext.extensions import InputGram, KBFGSQuantities, extend
from kfqn_ext.optim.plan import Layer, Plan, make_plan
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.replay import Replay
from kfqn_ext.optim.sides import Seen
from kfqn_ext.optim.table import render
from kfqn_ext.optim.validation import check_group
from kfqn_ext.optim.warm_start import gram_of_data

Closure = Callable[[], Tensor]


class KroneckerOptimizer(Optimizer):
    """Steps p = H_G M H_A for each linear and convolutional layer of a model, as a recipe says.

    With M the momentum of the gradient, M ← βM + ∂W, and W = [weight, bias]::

        W ← W - α (H_G M H_A + γ W)

    Parameters without such a block take p = M at the recipe's fallback rate. On every T-th step a second pass over
    the same minibatch shows what the step did, and the sides learn from both passes.

    A batch with a gradient that is not finite changes neither parameters nor state.

    State per layer, under its weight: ``momentum`` [*B, d_out, d_in] and what the sides keep (``H_A``, ``H_G``, …),
    in the weight's dtype, float32 at least.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        recipe: Recipe,
        lr: float | Tensor,
        damping: float,
        curvature_update_freq: int = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        """Plan the treatment of every parameter, then extend the model.

        Args:
            model: The model; :func:`kfqn_ext.extend` is called on it.
            params: Parameters or groups of them, as for any ``torch.optim`` optimizer; all of the model's if None.
                All of ``lr``, ``damping``, ``curvature_update_freq``, ``momentum`` and ``weight_decay`` can be set
                by group.
            recipe: The row of the table.
            lr: α > 0.
            damping: λ > 0, in units of the loss's second derivative.
            curvature_update_freq: T ≥ 1: the sides learn on every T-th step.
            momentum: β in [0, 1).
            weight_decay: γ ≥ 0, decoupled from the momentum.
            reduction: "mean" or "sum": what the loss does over the data of a batch.

        Raises:
            ValueError: If a hyperparameter is out of range or the groups do not fit the layers.
            UnsupportedLayerError: If the model has no layer with a Kronecker block.
        """
        self._model = model
        self._reduction = reduction
        self._plan: Plan | None = None
        self._replay = Replay(model)
        self._first: tuple[KBFGSQuantities | None, InputGram] | None = None
        self._due: list[tuple[Layer, dict[str, Any]]] = []
        self._warned: set[str] = set()
        self.recipe = recipe
        defaults = {
            "lr": lr,
            "damping": damping,
            "curvature_update_freq": curvature_update_freq,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "step": 0,
        }
        check_group(defaults)
        KBFGSQuantities(reduction=reduction)  # raises on a wrong reduction, before the model is extended
        super().__init__(list(model.named_parameters()) if params is None else params, defaults)
        self._replan()
        extend(model)

    # ------------------------------------------------------------------ groups, state, description

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example of layers that were frozen; see ``torch.optim.Optimizer``.

        Raises:
            ValueError: If a hyperparameter is out of range or the group splits a layer.
        """
        if self.param_groups:
            param_group.setdefault("step", self.param_groups[0]["step"])
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            if self._plan is not None:
                self._replan()
        except Exception:
            self.param_groups.pop()
            raise

    def _replan(self) -> None:
        self._plan = make_plan(self._model, {p: i for i, g in enumerate(self.param_groups) for p in g["params"]})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, keeping each tensor's own dtype.

        ``torch.optim.Optimizer`` casts state to the parameter's dtype; inverses stay as precise as they were saved.
        """
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for saved_id, p in zip(saved_ids, parameters, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.to(p.device, copy=True)

    def __repr__(self) -> str:
        """Describe the hyperparameters and the treatment of every parameter."""
        return render(type(self).__name__, self.param_groups, self._planned.rows)

    @property
    def _planned(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _layers(self) -> Iterator[tuple[Layer, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p in self._planned.layers:
                    yield self._planned.layers[p], group

    # ------------------------------------------------------------------ initial curvature

    def warm_start(self, loader: Any, forward: Callable[[Any], Any] | None = None, progress: bool = True) -> None:
        """Make the initial H_A = (A + λ_A I)⁻¹ from A over a data set, as ``algo_8`` does.

        Without it A is the first minibatch's. The model runs as it is (training mode if it is), without gradients;
        its buffers and the random number generators are left as they were.

        Args:
            loader: Batches; of a tuple or list, the first entry is the model's input.
            forward: Runs the model on one batch of the loader, where the above does not fit.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: If the loader is empty.
        """
        layers = [layer for layer, _ in self._layers()]
        grams = gram_of_data(self._model, layers, loader, forward, progress)
        for layer, group in self._layers():
            if layer in grams:
                A, num_locations = grams[layer]
                self._start(layer, group, A, num_locations)

    def _start(self, layer: Layer, group: dict[str, Any], A: Tensor, num_locations: float) -> None:
        """Make the sides' initial state. The one place that waits for the device: once per layer."""
        if not torch.isfinite(A).all():
            return self._warn_once(f"The inputs of layer {layer.name} are not finite: it has no curvature yet.")
        damping_A, damping_G = self.recipe.split(group["damping"], num_locations)
        state = self.state[layer.weight]
        self.recipe.input_side.start(state, A, damping_A)
        self.recipe.output_side.start(state, A.new_zeros(layer.geometry.matrix_shape[:-1]), damping_G)
        state["started"] = torch.ones((), dtype=torch.bool)

    # ------------------------------------------------------------------ the two passes

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Measure the forward and backward pass in the body, for loops that cannot pass a closure to ``step``."""
        if self._due:
            self._warn_once("A second pass was due and never ran: curvature was not updated. See second_pass_due.")
            self._due = []
        self._first = None
        due = [layer.module for layer, group in self._layers() if self._is_due(group) and layer.weight.requires_grad]
        fresh = [
            layer.module
            for layer, _ in self._layers()
            if layer.weight.requires_grad
            and (self.recipe.input_side.needs_gram or "started" not in self.state[layer.weight])
        ]
        fresh = [m for m in fresh if m in due or "started" not in self.state[m.weight]]
        moments = KBFGSQuantities(self._reduction, probe=self._probe, modules=due) if due else None
        gram = InputGram(modules=fresh)
        if due:
            self._replay.record()
        active = [e for e in (moments, gram if fresh else None) if e is not None]
        with backpack(*CTX.get_active_exts(), *active, extension_hook=CTX.get_extension_hook()):
            yield
        self._first = (moments, gram)

    @property
    def second_pass_due(self) -> bool:
        """Whether the last ``step`` wants a second pass over its minibatch, inside ``second_pass()``."""
        return bool(self._due)

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        """Repeat the forward and backward pass of this minibatch in the body, and learn from both passes.

        The body sees the random numbers of the first pass. Parameters get no gradient, ``.grad`` and all buffers
        are as before when it ends.
        """
        if not self._due or self._first is None:
            raise RuntimeError("second_pass() without a step that wants one: check second_pass_due first.")
        due, first, self._due, self._first = self._due, self._first, [], None
        moments = KBFGSQuantities(
            self._reduction, probe=lambda module, a_bar: None, modules=[layer.module for layer, _ in due]
        )
        with self._replay.repeat(), backpack(moments):
            yield
        with torch.no_grad():
            self._learn(due, first, moments)

    def _probe(self, module: nn.Module, a_bar: Tensor) -> Tensor | None:
        weight: Any = module.weight
        return self.recipe.input_side.probe(self.state[weight], a_bar)

    def _is_due(self, group: dict[str, Any]) -> bool:
        return bool((group["step"] + 1) % group["curvature_update_freq"] == 0)

    def _learn(
        self,
        due: list[tuple[Layer, dict[str, Any]]],
        first: tuple[KBFGSQuantities | None, InputGram],
        second: KBFGSQuantities | None,
    ) -> None:
        moments, gram = first
        for layer, group in due:
            if moments is None or layer.module not in moments or "started" not in self.state[layer.weight]:
                continue
            if second is not None and layer.module not in second:
                continue
            seen = Seen(
                first=moments[layer.module],
                second=None if second is None else second[layer.module],
                A=gram[layer.module].A if layer.module in gram else None,
            )
            damping_A, damping_G = self.recipe.split(group["damping"], seen.first.num_locations)
            state = self.state[layer.weight]
            self.recipe.input_side.learn(state, seen, damping_A)
            self.recipe.output_side.learn(state, seen, damping_G)

    # ------------------------------------------------------------------ the step

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
        """
        if closure is None:
            self._advance()
            return None
        with torch.enable_grad(), self.first_pass():
            loss = closure()
        self._advance()
        if self.second_pass_due:
            with torch.enable_grad(), self.second_pass():
                closure()
        return loss

    def _advance(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            raise RuntimeError(
                "No parameter has a gradient. The closure must run loss.backward(); without a closure, run it before "
                "step(), inside `with optimizer.first_pass():`."
            )
        first = self._first
        if first is None and not any("started" in self.state[layer.weight] for layer, _ in self._layers()):
            raise RuntimeError(
                "step() has nothing measured to work with. Pass a closure, step(Minibatch(model, loss_fn, x, y)), or "
                "run the backward pass inside `with optimizer.first_pass():`."
            )
        if first is not None:
            for layer, group in self._layers():
                if layer.module in first[1] and "started" not in self.state[layer.weight]:
                    gram = first[1][layer.module]
                    self._start(layer, group, gram.A, gram.num_locations)
        self._descend(grads)
        due = [(layer, group) for layer, group in self._layers() if self._is_due(group)]
        for group in self.param_groups:
            group["step"] += 1
        if first is None or not due:
            if due:
                self._warn_once("step() ran without measurements when curvature was due; it was not updated.")
        elif self.recipe.output_side.needs_second_pass:
            self._due = due
        else:
            self._learn(due, first, None)

    def _descend(self, grads: list[Tensor]) -> None:
        finite = torch.isfinite(get_total_norm(grads, float("inf")))
        for group in self.param_groups:
            fallback_lr = self.recipe.fallback_rate(group["lr"], group["damping"])
            for p in group["params"]:
                layer = self._planned.layers.get(p)
                if layer is not None and (p.grad is not None or (layer.bias is not None and layer.bias.grad is not None)):
                    self._step_layer(layer, group, finite.to(p.device))
                elif layer is None and p not in self._planned.covered and p.grad is not None:
                    state, working = self.state[p], torch.promote_types(p.dtype, torch.float32)
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p, dtype=working)
                    _accumulate(state["momentum"], p.grad, group["momentum"], finite.to(p.device))
                    _move(p, state["momentum"], fallback_lr, group, finite.to(p.device))

    def _step_layer(self, layer: Layer, group: dict[str, Any], finite: Tensor) -> None:
        state, geometry, weight = self.state[layer.weight], layer.geometry, layer.weight
        if "momentum" not in state:
            working = torch.promote_types(weight.dtype, torch.float32)
            state["momentum"] = torch.zeros(geometry.matrix_shape, dtype=working, device=weight.device)
        M = state["momentum"]
        inner = geometry.d_in - geometry.has_bias
        parts = [(weight, M[..., :inner]), (layer.bias, M[..., inner])] if layer.bias is not None else [(weight, M[..., :inner])]
        for p, part in parts:
            if p is not None and p.grad is not None:
                _accumulate(part, p.grad.reshape(part.shape), group["momentum"], finite)
        if "started" in state:
            P = self.recipe.output_side.precondition(state, self.recipe.input_side.precondition(state, M))
            rate = group["lr"]
        else:
            self._warn_once(
                f"Layer {layer.name} has a gradient but was not measured (called through F.linear, or compiled "
                "before it was extended?); it takes the momentum direction."
            )
            P, rate = M, self.recipe.fallback_rate(group["lr"], group["damping"])
        for p, part in ((weight, P[..., :inner]), (layer.bias, P[..., inner] if geometry.has_bias else None)):
            if p is not None and part is not None and p.grad is not None:
                _move(p, part.reshape(p.shape), rate, group, finite)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message, stacklevel=3)


def _accumulate(M: Tensor, grad: Tensor, momentum: float, finite: Tensor) -> None:
    """M ← βM + g, or M where the batch is not finite. (0 · NaN is NaN: select, don't multiply.)"""
    M.mul_(torch.where(finite, momentum, 1.0)).add_(torch.where(finite, grad, 0.0))


def _move(p: Tensor, direction: Tensor, rate: float | Tensor, group: dict[str, Any], finite: Tensor) -> None:
    """θ ← θ - r p - αγθ, or θ where the batch is not finite."""
    if group["weight_decay"]:
        p.mul_(1.0 - torch.where(finite, group["lr"] * group["weight_decay"], 0.0))
    p.sub_(direction * torch.where(finite, rate, 0.0))
