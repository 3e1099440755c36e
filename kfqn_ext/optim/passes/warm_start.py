"""Curvature over a whole data set, before training starts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import map_leaves
from kfqn_ext.calling import call
from kfqn_ext.extensions import (
    Gram,
    InputGram,
    InputMoments,
    InputQuantities,
    InputTrace,
    InputTraces,
    LayerExtension,
    averaged,
    input_gradients_only,
    measuring,
)
from kfqn_ext.geometry import LayerGeometry, layer_input, refuse_nested
from kfqn_ext.linalg import full_precision
from kfqn_ext.optim.groups.plan import Layer
from kfqn_ext.optim.inverses import Measured
from kfqn_ext.optim.inverses.base import Kind
from kfqn_ext.optim.passes.measurement import Measurement, Probes, Results
from kfqn_ext.optim.passes.replay import cuda_devices
from kfqn_ext.optim.passes.snapshot import left_as_it_was
from kfqn_ext.optim.recipe import Recipe, SecondPass

_OF_INPUTS: dict[Kind, Callable[[LayerGeometry, Tensor, dict[str, Any]], Any]] = {
    InputGram: lambda geometry, x, counts: Gram(A=geometry.gram(x), **counts),
    InputQuantities: lambda geometry, x, counts: InputMoments(a_bar=geometry.mean_patch(x), **counts),
    InputTraces: lambda geometry, x, counts: InputTrace(
        A=geometry.trace(x, counts["num_locations"]) / geometry.d_in, **counts
    ),
}
"""What a layer's input tells, by the extension that would measure it."""


def measure_data(
    model: nn.Module,
    layers: Sequence[Layer],
    recipe: Recipe,
    reduction: str,
    batches: Iterable[tuple[Any, bool]],
    forward: Callable[[Any], Any] | None,
    seeds: Iterator[int],
) -> tuple[Results, int]:
    """Run a model over a data set and average what makes a recipe's initial curvature.

    Args:
        model: The model, extended, in the mode in which it is to run.
        layers: The layers.
        recipe: The recipe.
        reduction: "mean" or "sum": what the loss does over the data of a batch.
        batches: Each with whether it counts; others are run, and not averaged over.
        forward: Runs the model on a batch; by default on its first entry, moved to the model's device. A
            :class:`Minibatch` runs itself.
        seeds: Of the targets that a :class:`Minibatch` samples, one a batch.

    Returns:
        Averages over the data of each layer that ran, by its module; the number of batches that counted.

    Raises:
        ValueError: If ``forward`` is needed and missing.
    """
    kinds = {layer: recipe.at(layer.geometry.d_in).starts_from for layer in layers}
    inputs_suffice = all(of_layer <= _OF_INPUTS.keys() for of_layer in kinds.values())
    differentiated = None if inputs_suffice else recipe.second_pass
    run = forward or partial(_run, model, layers[0].weight.device, differentiated, seeds)
    averages: dict[nn.Module, dict[Kind, Any]] = {}
    count = 0
    # A function of somebody's own may run a backward pass, needed or not.
    inputs_only = torch.no_grad if forward is None else partial(_aside, model)
    with left_as_it_was(model), torch.random.fork_rng(devices=cuda_devices(model)):
        for batch, counts in batches:
            if inputs_suffice:
                with inputs_only():
                    seen = _inputs(kinds, run, batch)
            else:
                seen = _pass(model, kinds, reduction, run, batch)
            _add(averages, seen if counts else {})
            count += counts
    return Results({module: Measured(quantities) for module, quantities in averages.items()}), count


def _add(averages: dict[nn.Module, dict[Kind, Any]], seen: dict[nn.Module, dict[Kind, Any]]) -> None:
    """Average over one more batch; tensors of the old averages are overwritten."""
    for module, quantities in seen.items():
        known = averages.setdefault(module, {})
        for kind, new in quantities.items():
            known[kind] = averaged([known[kind], new]) if kind in known else new


def _run(
    model: nn.Module, device: torch.device, differentiated: SecondPass | None, seeds: Iterator[int], batch: Any
) -> None:
    """Run the model on a batch; where its gradients count, with the targets that the second pass has."""
    is_minibatch = all(hasattr(batch, name) for name in ("output", "sampled"))
    if is_minibatch and differentiated is not None:
        batch.sampled(next(seeds)) if differentiated.sampled else batch()
    elif is_minibatch:
        batch.output()
    elif differentiated is not None:
        raise ValueError(
            "warm_start: this optimizer's initial curvature needs gradients. Pass forward=f, where f(batch) runs a "
            f"forward and backward pass{', with targets that it samples' if differentiated.sampled else ''}; or a "
            "loader of Minibatch, which does: (Minibatch(model, loss_fn, *batch) for batch in loader)."
        )
    else:
        x = batch[0] if type(batch) in (tuple, list) else batch
        call(model, map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, x))


@contextmanager
def _aside(model: nn.Module, extensions: Sequence[LayerExtension[Any]] = ()) -> Iterator[None]:
    """Run passes that compute no parameter's gradient, and that nobody else measures."""
    with torch.enable_grad(), input_gradients_only(model), measuring(extensions, alone=True):
        yield


def _pass(
    model: nn.Module,
    kinds: Mapping[Layer, Iterable[Kind]],
    reduction: str,
    run: Callable[[Any], Any],
    batch: Any,
) -> dict[nn.Module, dict[Kind, Any]]:
    """What a forward and backward pass over one batch shows."""
    wanted: dict[Kind, list[nn.Module]] = {}
    for layer, of_layer in kinds.items():
        for kind in of_layer:
            wanted.setdefault(kind, []).append(layer.module)
    probes = Probes(A=lambda module, a_bar: None)
    measurement = Measurement(wanted, reduction, probes, of_grad=True)
    with _aside(model, measurement.extensions):
        run(batch)
    return measurement.quantities()


def _inputs(
    kinds: Mapping[Layer, Iterable[Kind]], run: Callable[[Any], Any], batch: Any
) -> dict[nn.Module, dict[Kind, Any]]:
    """What is known of one batch without a backward pass: the layers' inputs suffice."""
    found: dict[nn.Module, dict[Kind, Any]] = {}

    def watch(layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.is_nested:
            refuse_nested(module)
        geometry = layer.geometry
        x = geometry.as_batch(layer_input(args, kwargs))
        if x.shape[0] == 0:
            return
        x = x.to(torch.promote_types(layer.weight.dtype, torch.float32))
        with torch.no_grad(), full_precision():
            locations = geometry.num_locations(geometry.as_batch(output))
            counts = {"num_data": x.shape[0], "num_locations": locations}
            seen = {kind: _OF_INPUTS[kind](geometry, x, counts) for kind in kinds[layer]}
        _add(found, {module: seen})

    with ExitStack() as stack:
        for layer in kinds:
            stack.callback(
                layer.module.register_forward_hook(partial(watch, layer), with_kwargs=True, prepend=True).remove
            )
        run(batch)
    return found
