"""A ``torch.optim.Optimizer`` that knows the layers of its model: groups, schedules, checkpoints, description."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from kfqn_ext.extensions import extend
from kfqn_ext.optim import blocks, descent, loading
from kfqn_ext.optim.diagnostics import LayerDiagnostics, diagnose
from kfqn_ext.optim.plan import Layer, Plan, make_plan
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.rounded import RoundedInverses
from kfqn_ext.optim.schedules import Schedule, apply_schedules, take_schedules
from kfqn_ext.optim.table import render
from kfqn_ext.optim.validation import check_group

Work = list[tuple[Layer, dict[str, Any]]]
# Of the state: to be raised when the names or the meaning of its tensors change.
LAYOUT = 1


class PlannedOptimizer(Optimizer):
    """What an optimizer of layers is apart from how it steps."""

    recipe: Recipe

    def __init__(self, model: nn.Module, params: Any, recipe: Recipe, defaults: dict[str, Any]) -> None:
        """Plan the treatment of every parameter, then extend the model.

        Args:
            model: The model.
            params: Parameters or groups of them; all of the model's if None.
            recipe: The row of the table.
            defaults: Hyperparameters of groups that do not set them.

        Raises:
            ValueError: If a hyperparameter is out of range or the groups do not fit the layers.
            UnsupportedLayerError: If the model has no layer with a Kronecker block.
        """
        self._model = model
        self._plan: Plan | None = None
        self._schedules: list[dict[str, Schedule]] = []
        self._warned: set[str] = set()
        self._state_is_empty = False  # its tensors have names and shapes, but were never measured
        self._rejected: set[nn.Module] = set()  # layers measured in this step, but not finite
        self._rounded = RoundedInverses()
        self.recipe = recipe
        self._layout = f"{LAYOUT} {type(recipe.input_side).__name__} {type(recipe.output_side).__name__}"
        defaults = {**defaults, "step": 0, "layout": self._layout}
        super().__init__(list(model.named_parameters()) if params is None else params, defaults)
        self._replan()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example of layers that were frozen; see ``torch.optim.Optimizer``.

        Raises:
            ValueError: If a hyperparameter is out of range or the group splits a layer.
        """
        step = self.param_groups[0]["step"] if self.param_groups else 0
        super().add_param_group(self._with_names(param_group))
        group = self.param_groups[-1]
        try:
            group["step"] = step
            schedules = take_schedules(group, step)
            check_group(group)
            if self._plan is not None:
                self._replan()
        except Exception:
            self.param_groups.pop()
            raise
        self._schedules.append(schedules)

    def _with_names(self, group: dict[str, Any]) -> dict[str, Any]:
        """Name the parameters of a group where those of the others have names: torch takes no mixture."""
        params = group["params"]
        if not self.param_groups or "param_names" not in self.param_groups[0] or isinstance(params, set):
            return group
        params = [params] if isinstance(params, Tensor) else list(params)
        names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        return {**group, "params": [(names.get(p, "?"), p) if isinstance(p, Tensor) else p for p in params]}

    def _replan(self) -> None:
        self._plan = make_plan(self._model, {p: i for i, g in enumerate(self.param_groups) for p in g["params"]})
        extend(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, as precisely as the state of these parameters is kept.

        ``torch.optim.Optimizer`` casts state to the parameter's dtype; here that is float32 at least.

        Raises:
            ValueError: If the state is of another kind of optimizer, another version's, or another model's.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        self._check_loadable(state_dict, zip(saved_ids, parameters, strict=False))
        super().load_state_dict(state_dict)
        self._state_is_empty = False
        for saved_id, p in zip(saved_ids, parameters, strict=True):
            if p not in self.state:
                continue
            saved = state_dict["state"][saved_id]
            if blocks.is_empty(saved):
                del self.state[p]
            else:
                self.state[p] = loading.fitted(saved, p)

    def _follow_parameters(self) -> None:
        """Bring the state to where the parameters are, and to their dtype: after ``model.double()`` and its like."""
        for p, state in self.state.items():
            if not loading.is_fitted(state, p):
                self.state[p] = loading.fitted(state, p)

    def _check_loadable(self, state_dict: dict[str, Any], parameters: Iterable[tuple[Any, Tensor]]) -> None:
        found = {group.get("layout", "0, without a mark") for group in state_dict["param_groups"]}
        if found - {self._layout}:
            raise ValueError(
                f"This state has the layout {found.pop()!r}, and {type(self).__name__} reads {self._layout!r} "
                "(version, input side, output side): it was saved by another version of the package or by another "
                "optimizer. Load it with that one; or load the model alone and start with fresh curvature (warm_start)."
            )
        for saved_id, p in parameters:
            layer = self._planned.layers.get(p)
            expected = loading.expected_state(p, layer, self.recipe)
            whose = f"parameter {saved_id!r}, here of shape {list(p.shape)}"
            whose = whose if layer is None else f"layer {layer.name}, {whose}"
            loading.check_shapes(state_dict["state"].get(saved_id, {}), expected, whose)

    def diagnostics(self) -> list[LayerDiagnostics]:
        """Describe the curvature of every layer: pairs kept, damped and skipped, eigenvalues, dampings."""
        return [
            diagnose(layer, self.state.get(layer.weight, {}), self.recipe, group["damping"])
            for layer, group in self._layers()
        ]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's layers would not be those of any model."""
        raise TypeError(
            f"{type(self).__name__} belongs to its model and can't be copied or pickled alone. Copy or save "
            "model.state_dict() and optimizer.state_dict(), and build a new optimizer on the new model."
        )

    def __repr__(self) -> str:
        """Describe the hyperparameters and the treatment of every parameter."""
        return render(type(self).__name__, self.param_groups, self._planned.rows)

    @property
    def _planned(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _recipe_of(self, layer: Layer) -> Recipe:
        """The row of the table by which this layer is treated now."""
        return self.recipe

    def _layers(self) -> Work:
        layers = self._planned.layers
        return [(layers[p], group) for group in self.param_groups for p in group["params"] if p in layers]

    def _apply_schedules(self) -> None:
        """Set scheduled values for the step that begins; again does no harm, and nothing looks further ahead."""
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            apply_schedules(group, schedules)

    def _is_due(self, group: dict[str, Any], key: str = "curvature_update_freq") -> bool:
        return bool((group["step"] + 1) % group[key] == 0)

    # ------------------------------------------------------------------ the step, given the curvature

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _finite(self) -> Tensor:
        """Whether all gradients are finite, and small enough to be squared, bool []."""
        # The Euclidean norm: on a CPU it costs a twentieth of the largest entry. float16 can't hold it.
        grads = [g.float() if g.dtype == torch.float16 else g for g in self._gradients()]
        return torch.isfinite(get_total_norm(grads))

    def _descend(self, loss: Tensor | None, step_cap: float | None, finite: Tensor) -> None:
        """Move all parameters along their directions, unless the batch is not finite."""
        gate = descent.Gate(finite)
        for group in self.param_groups:
            descent.forget(self._idle_momenta(group), gate)
            descent.accumulate(list(self._momenta(group)), group, gate)
        moves = [move for group in self.param_groups for move in self._directions(group)]
        if step_cap is not None and loss is not None:
            shorten = descent.shortening(moves, loss, step_cap)
            moves = [replace(move, rate=move.rate * shorten) for move in moves]
        for move in moves:
            descent.apply(move, gate)

    def _momenta(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each gradient of a group, after the part of the momentum that it belongs to."""
        for p in group["params"]:
            layer = self._planned.layers.get(p)
            if layer is not None and self._has_gradient(layer):
                for q, part in descent.moving_parts(layer, descent.layer_momentum(layer, self.state[p])):
                    assert q.grad is not None
                    yield part, q.grad.reshape(part.shape)
            elif p not in self._planned.covered and p.grad is not None:
                yield descent.momentum_of(p, self.state[p]), p.grad

    def _idle_momenta(self, group: dict[str, Any]) -> Iterator[Tensor]:
        """Parts of a group's momenta whose parameter has no gradient, though its layer has one."""
        for p in group["params"]:
            layer = self._planned.layers.get(p)
            if layer is not None and self._has_gradient(layer):
                yield from descent.idle_parts(layer, descent.layer_momentum(layer, self.state[p]))

    @staticmethod
    def _has_gradient(layer: Layer) -> bool:
        return layer.weight.grad is not None or (layer.bias is not None and layer.bias.grad is not None)

    def _directions(self, group: dict[str, Any]) -> Iterator[descent.Move]:
        """All moves of a group."""
        fallback_rate = self.recipe.fallback_rate(group["lr"], group["damping"])
        shrink = 1.0 - group["lr"] * group["weight_decay"]
        for p in group["params"]:
            layer = self._planned.layers.get(p)
            if layer is not None and self._has_gradient(layer):
                yield from self._layer_moves(layer, group, fallback_rate, shrink)
            elif p not in self._planned.covered and p.grad is not None:
                M = descent.momentum_of(p, self.state[p])
                yield descent.Move(p, M, M, fallback_rate, group["lr"], shrink)

    def _layer_moves(
        self, layer: Layer, group: dict[str, Any], fallback_rate: Any, shrink: Any
    ) -> Iterator[descent.Move]:
        state, rate = self.state[layer.weight], group["lr"]
        M = P = descent.layer_momentum(layer, state)
        if blocks.is_started(state) and layer.weight.grad is not None:
            inverses = self._rounded.view(layer.weight, state, group["direction_dtype"])
            P = blocks.precondition(inverses, self._recipe_of(layer), M)
        else:
            rate = fallback_rate
            if layer.module not in self._rejected:
                self._warn_once(
                    f"Layer {layer.name} has a gradient but was not measured (called through F.linear, compiled "
                    "before it was extended, or its weight frozen?); it takes the momentum direction."
                )
        for (p, part), (_, m) in zip(descent.moving_parts(layer, P), descent.moving_parts(layer, M), strict=True):
            yield descent.Move(p, part.reshape(p.shape), m, rate, group["lr"], shrink)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message, stacklevel=3)
