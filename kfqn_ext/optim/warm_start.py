"""Curvature over a whole data set, before training starts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from backpack import backpack
from torch import Tensor, nn
from tqdm import tqdm

from kfqn_ext.extensions import FactorPower, Gram, KFACFactors, extend, input_gradients_only
from kfqn_ext.optim import blocks
from kfqn_ext.optim.plan import Layer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.sides import Measured


def measure_data(
    model: nn.Module,
    layers: Sequence[Layer],
    recipe: Recipe,
    reduction: str,
    loader: Iterable[Any],
    forward: Callable[[Any], Any] | None,
    progress: bool,
) -> dict[Layer, Measured]:
    """Run a model over a data set and average what makes a recipe's initial curvature.

    Args:
        model: The model, in the mode in which it is to run.
        layers: The layers.
        recipe: The recipe.
        reduction: "mean" or "sum": what the loss does over data.
        loader: Batches.
        forward: Runs the model on a batch; by default on its first entry, moved to the model's device.
        progress: Whether to show a progress bar.

    Returns:
        Averages over the data of each layer that ran.

    Raises:
        ValueError: If there is no batch, or ``forward`` is needed and missing.
    """
    kinds = blocks.start_kinds(recipe)
    needs_loss = kinds - {"gram"}
    if needs_loss and forward is None:
        raise ValueError(
            "warm_start: this optimizer's initial curvature needs gradients. Pass forward=f, where f(batch) runs a "
            "forward and backward pass, e.g. lambda batch: Minibatch(model, loss_fn, *batch).sampled(seed=0)."
        )
    device = layers[0].weight.device
    averages = {layer: _InputAverage(layer) for layer in layers}
    modules = [layer.module for layer in layers]
    factors = KFACFactors(reduction, accumulate=True, modules=modules)
    power = FactorPower(reduction, modules=modules)
    factors.mirrored = power.mirrored = False

    def run(batch: Any) -> None:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        model(x.to(device))

    buffers = [(b, b.clone()) for b in model.buffers()]
    count = 0
    with ExitStack() as stack:
        stack.callback(_restore, buffers)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if "factors" in kinds:
            extend(model)
            stack.enter_context(input_gradients_only(model))
            stack.enter_context(backpack(factors))
        elif needs_loss:
            extend(model)
            stack.enter_context(input_gradients_only(model))
            stack.enter_context(backpack(power))
        else:
            stack.enter_context(torch.no_grad())
        if "gram" in kinds:
            for layer in layers:
                handle = layer.module.register_forward_hook(partial(_watch, averages[layer]), with_kwargs=True)
                stack.callback(handle.remove)
        for batch in tqdm(loader, desc="warm start", disable=not progress, leave=False):
            (forward or run)(batch)
            count += 1
    if count == 0:
        raise ValueError(
            "warm_start: the loader has no batch. A list or a DataLoader works; a used-up iterator doesn't."
        )
    found = {
        layer: Measured(
            gram=averages[layer].gram,
            factors=factors.get(layer.module),
            power=power.get(layer.module),
        )
        for layer in layers
    }
    return {layer: measured for layer, measured in found.items() if measured.A is not None}


class _InputAverage:
    """A over all data that a layer has seen so far."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.gram: Gram | None = None

    def add(self, x: Tensor, output: Tensor) -> None:
        geometry = self._layer.geometry
        x, output = geometry.as_batch(x.detach()), geometry.as_batch(output.detach())
        if x.shape[0] == 0:
            return
        A = geometry.gram(x.to(torch.promote_types(self._layer.weight.dtype, torch.float32)))
        num_locations = float(geometry.num_locations(output))
        if self.gram is None:
            self.gram = Gram(A, x.shape[0], num_locations)
            return
        total = self.gram.num_data + x.shape[0]
        share = x.shape[0] / total
        locations = self.gram.num_locations + share * (num_locations - self.gram.num_locations)
        self.gram = Gram(self.gram.A.lerp_(A, share), total, locations)


def _watch(average: _InputAverage, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
        average.add(args[0] if args else kwargs["input"], output)


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for b, value in buffers:
            b.copy_(value)
