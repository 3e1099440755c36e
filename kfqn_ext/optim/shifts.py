"""Layers whose output is normalized at once: there ∂h̄ = 0, and H_G has nothing to learn.

BatchNorm in training mode subtracts the mean of what it is given, so that a shift of a channel changes nothing and
Σ_n Σ_t ∂h = 0 for the layer before it. Such layers are found from the network as it runs: a normalization reads the
very tensor that a layer made, and the layer's ∂h̄ is rounding noise, which it would not be were it read elsewhere too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_batch_or_instance_norm
from kfqn_ext.extensions import LayerMoments
from kfqn_ext.linalg.pairs import dot

Normalizers = dict[nn.Module, nn.Module]  # layer ↦ the module that normalizes its output


def removes_shifts(module: nn.Module) -> bool:
    """Whether a module normalizes with the mean of its own input: batch and instance normalization can."""
    return is_batch_or_instance_norm(module) and (module.training or module.running_mean is None)


@contextmanager
def find_normalizers(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[Normalizers]:
    """Find out which layers' outputs are what a normalization reads, while the body runs the model.

    Yields:
        A dictionary that fills while the body runs.
    """
    made_by: dict[Any, nn.Module] = {}  # by the node of autograd's graph, which an in-place operation replaces
    found: Normalizers = {}

    def note_output(layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None and not torch.compiler.is_compiling():
            made_by[output.grad_fn] = layer

    def note_input(norm: nn.Module, args: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.grad_fn in made_by:
            found[made_by[x.grad_fn]] = norm

    hooks = [layer.register_forward_hook(note_output) for layer in layers]
    hooks += [norm.register_forward_pre_hook(note_input) for norm in model.modules() if removes_shifts(norm)]
    try:
        yield found
    finally:
        made_by.clear()
        for hook in hooks:
            hook.remove()


def is_noise(moments: LayerMoments) -> Tensor:
    """Whether ∂h̄ is below its rounding error, bool []."""
    return (dot(moments.dh_bar, moments.dh_bar) <= dot(moments.dh_noise, moments.dh_noise)).all()
