"""An optimizer of layers that knows how their curvature is made, learned and renewed, whatever its step loop does."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from kfqn_ext.optim import blocks, descent
from kfqn_ext.optim.measure import Measurement
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.planned import PlannedOptimizer, Work
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.shifts import Normalizers, find_normalizers, is_noise, removes_shifts
from kfqn_ext.optim.sides import Measured, Seen
from kfqn_ext.optim.warm_start import measure_data


class LearningOptimizer(PlannedOptimizer):
    """Curvature of all layers: made from data, learned from two passes, inverted again when that is due."""

    def __init__(self, model: nn.Module, params: Any, recipe: Recipe, defaults: dict[str, Any], reduction: str) -> None:
        """See :class:`PlannedOptimizer`; ``reduction`` is what the loss does over the data of a batch."""
        self._reduction = reduction
        self._refreshing: Work = []
        # Layers' modules (which outlive a plan) whose H_G has learned nothing, as shifts of their output are removed,
        # and by which module.
        self._normalized: dict[nn.Module, nn.Module] | None = None  # None: not looked for yet
        self._spared: set[nn.Module] = set()  # those of them that need no output side in this step
        cheaper = recipe.output_side.where_shifts_are_removed()
        self._spares = cheaper is not None
        self._recipe_of_normalized = replace(recipe, output_side=cheaper or recipe.output_side)
        super().__init__(model, params, recipe, defaults)

    def warm_start(
        self,
        loader: Any,
        forward: Callable[[Any], Any] | None = None,
        progress: bool = True,
    ) -> None:
        """Make the initial curvature from a whole data set, as the paper does; without it, from the first minibatch.

        A needs the layers' inputs only. A recipe with sampled targets also needs ``forward``, which must then run
        the backward pass of a loss with such targets, for example ``lambda b: Minibatch(...).sampled(seed)``.
        The model runs in the mode it is in; parameters, ``.grad``, buffers and random numbers are left as they were.

        Args:
            loader: Batches; of a tuple or list, the first entry is the model's input.
            forward: Runs the model on one batch of the loader, where the above does not fit.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: If the loader is empty, or ``forward`` is needed and missing.
        """
        layers = [layer for layer, _ in self._layers()]
        measured = measure_data(self._model, layers, self.recipe, self._reduction, loader, forward, progress)
        self._forget_empty_state()
        for layer, group in self._layers():
            if layer in measured and not self._start(layer, group, measured[layer]):
                warn(
                    f"warm_start: what layer {layer.name} saw is not finite, and its curvature was not made from it; "
                    "it starts from the first minibatch instead. Look for NaN and inf in the data.",
                    stacklevel=2,
                )

    def _recipe_of(self, layer: Layer) -> Recipe:
        return self._recipe_of_normalized if layer.module in self._spared else self.recipe

    def _spare(self) -> None:
        """Find out which layers need no output side in the step that begins: modules change their mode."""
        self._spared = {module for module, norm in (self._normalized or {}).items() if removes_shifts(norm)}

    @contextmanager
    def _look_for_normalizers(self, layers: Collection[nn.Module]) -> Iterator[Normalizers | None]:
        """Look, once, for the layers before a normalization, where the recipe has a cheaper output side for them."""
        if self._normalized is not None or not layers or not self._spares:
            yield None
            return
        with find_normalizers(self._model, layers) as found:
            yield found

    def _settle_normalized(self, due: Work, found: Normalizers, first: Measurement, finite: Tensor) -> None:
        """Keep the layers whose ∂h̄ is indeed noise and whose H_G has learned nothing; waits for the device, once."""
        if not found:
            self._normalized = {}
        elif bool(finite):
            candidates = [layer for layer, _ in due if layer.module in found]
            kept = [layer.module for layer in candidates if self._needs_no_output_side(layer, first)]
            self._normalized = {module: found[module] for module in kept}
            self._spare()

    def _needs_no_output_side(self, layer: Layer, first: Measurement) -> bool:
        moments, seen = first.of(layer.module).moments, self.state[layer.weight].get("pairs_seen_G")
        return moments is not None and seen is not None and bool(is_noise(moments)) and not bool(seen[0].any())

    def _start(self, layer: Layer, group: dict[str, Any], measured: Measured) -> bool:
        """Make a layer's initial curvature, unless what was measured is not finite."""
        state = self.state.get(layer.weight, {})
        started = blocks.start(layer, state, self.recipe, group["damping"], measured)
        if started:
            self.state[layer.weight] = state
            descent.layer_momentum(layer, state)
        else:
            self._rejected.add(layer.module)
        return started

    def _probe(self, module: nn.Module, a_bar: Tensor) -> Tensor | None:
        weight: Any = module.weight
        return self.recipe.input_side.probe(self.state.get(weight, {}), a_bar)

    def _learn(self, due: Work, first: Measurement, second: Measurement | None, finite: Tensor, step: int) -> None:
        """Start what has no curvature yet, and let the rest learn, from the minibatch of step k."""
        together = defaultdict(list)
        for layer, group in due:
            before, after = first.of(layer.module), Measured() if second is None else second.of(layer.module)
            if not blocks.is_started(self.state[layer.weight]):
                if after.factors is not None:
                    self._start(layer, group, after)
            elif self._complete(layer, before, after):
                spared = layer.module in self._spared
                if self._normalized and not spared:
                    self._normalized.pop(layer.module, None)
                together[spared, blocks.kin(layer)].append((layer, group["damping"], before, after))
        for lessons in together.values():
            layers, dampings, firsts, seconds = zip(*lessons, strict=True)
            seen = Seen(firsts, seconds, finite.to(layers[0].weight.device), step)
            states = [self.state[layer.weight] for layer in layers]
            blocks.learn(layers, states, self._recipe_of(layers[0]), dampings, seen)

    def _reached(self, layer: Layer, first: Measured) -> bool:
        """Whether the first pass measured a layer that is due."""
        reached = all(getattr(first, kind) is not None for kind in blocks.first_kinds(self.recipe))
        if not reached and layer.weight.grad is not None and blocks.is_started(self.state.get(layer.weight)):
            self._warn_once(
                f"Layer {layer.name} has a gradient but was not measured when its curvature was due (called through "
                "F.linear, compiled before it was extended, or backward() with create_graph=True?); it keeps what it "
                "has."
            )
        return reached

    def _complete(self, layer: Layer, first: Measured, second: Measured) -> bool:
        """Whether both passes reached a layer, with the same data."""
        if not self._reached(layer, first):
            return False
        if any(getattr(second, kind) is None for kind in blocks.second_kinds(self._recipe_of(layer))):
            return False
        before, after = first.moments, second.moments
        if before is None or after is None:
            return True
        sizes = [(q.num_data, q.num_locations) for q in (before, after)]
        if sizes[0] != sizes[1]:
            self._warn_once(
                f"Layer {layer.name} saw {sizes[0][0]} data at {sizes[0][1]:g} locations in the first pass and "
                f"{sizes[1][0]} at {sizes[1][1]:g} in the second: it learned nothing from them. The second pass must "
                "repeat the first, micro-batches included, and auxiliary passes belong outside both."
            )
        return sizes[0] == sizes[1]

    def _start_from(self, first: Measurement) -> None:
        """Make the initial curvature of layers that the first pass alone can start."""
        if "factors" in blocks.start_kinds(self.recipe):
            return
        for layer, group in self._layers():
            measured = first.of(layer.module)
            if measured.A is not None and not blocks.is_started(self.state.get(layer.weight)):
                self._start(layer, group, measured)

    def _has_curvature(self) -> bool:
        """Whether a layer has any, made from data."""
        return not self._state_is_empty and any(blocks.is_started(self.state.get(w[0].weight)) for w in self._layers())

    def _refresh(self) -> None:
        for layer, group in self._refreshing:
            if blocks.is_started(self.state.get(layer.weight)):
                blocks.refresh(layer, self.state[layer.weight], self.recipe, group["damping"])
        self._refreshing = []

    def _is_asked_for_empty_state(self) -> bool:
        """Whether this is ``torch.distributed.checkpoint``: a first step at rate and gradients of zero, for the keys.

        A warm-up from a rate of zero has other gradients; nothing but such a first step looks at them.
        """
        if self.state or any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        gradients = self._gradients()
        return bool(gradients) and not any(bool(g.any()) for g in gradients)

    def _forget_empty_state(self) -> None:
        """Before there is curvature: of an empty state, into which nothing was loaded."""
        if self._state_is_empty:
            self.state.clear()
            self._state_is_empty = False

    def _make_empty_state(self) -> None:
        self._state_is_empty = True
        for layer, group in self._layers():
            blocks.start_empty(layer, self.state[layer.weight], self.recipe, group["damping"])
        others = [p for group in self.param_groups for p in group["params"] if p not in self.state]
        for p in others:
            covered = p in self._planned.covered
            self.state[p] = {} if covered else {"momentum": torch.zeros_like(p, dtype=descent.working_dtype(p))}
