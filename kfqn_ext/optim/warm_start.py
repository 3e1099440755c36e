"""A over a whole data set, before training starts."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kfqn_ext.optim.plan import Layer


class _RunningGram:
    """Mean of A over all data seen so far, and |T|."""

    def __init__(self) -> None:
        self.A: Tensor | None = None
        self.num_data = 0
        self.num_locations = 0.0

    def add(self, layer: Layer, x: Tensor, output: Tensor) -> None:
        x, output = layer.geometry.as_batch(x), layer.geometry.as_batch(output)
        if x.shape[0] == 0:
            return
        A = layer.geometry.gram(x.to(torch.promote_types(layer.weight.dtype, torch.float32)))
        self.num_data += x.shape[0]
        share = x.shape[0] / self.num_data
        self.A = A if self.A is None else self.A.lerp_(A, share)
        self.num_locations += share * (layer.geometry.num_locations(output) - self.num_locations)


def gram_of_data(
    model: nn.Module,
    layers: Sequence[Layer],
    loader: Iterable[Any],
    forward: Callable[[Any], Any] | None,
    progress: bool,
) -> dict[Layer, tuple[Tensor, float]]:
    """Run a model over a data set and average each layer's A, ``eq_8``.

    Args:
        model: The model, in the mode in which it is to run. Buffers and random numbers are left as they were.
        layers: The layers.
        loader: Batches.
        forward: Runs the model on a batch; by default on its first entry, moved to the model's device.
        progress: Whether to show a progress bar.

    Returns:
        (A, |T|) for each layer that ran.

    Raises:
        ValueError: If there is no batch.
    """
    grams = {layer: _RunningGram() for layer in layers}
    device = layers[0].weight.device

    def run(batch: Any) -> None:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        model(x.to(device))

    def watch(layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        with torch.autocast(output.device.type, enabled=False):
            grams[layer].add(layer, args[0] if args else kwargs["input"], output)

    handles = [layer.module.register_forward_hook(partial(watch, layer), with_kwargs=True) for layer in layers]
    buffers = [(b, b.clone()) for b in model.buffers()]
    count = 0
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for batch in tqdm(loader, desc="warm start", disable=not progress, leave=False):
                (forward or run)(batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
        for b, value in buffers:
            b.copy_(value)
    if count == 0:
        raise ValueError("warm_start: the loader has no batch. A list or a DataLoader works; a used-up iterator doesn't.")
    return {layer: (g.A, g.num_locations) for layer, g in grams.items() if g.A is not None}
