"""Targets sampled from a model's predictive distribution: what makes KFAC's second factor a Fisher matrix.

A loss that is a negative log-likelihood says which distribution: cross entropy a categorical one, binary cross
entropy with logits Bernoulli's, a squared error a Gaussian of variance ½.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

__all__ = ["Sampler", "bernoulli", "categorical", "gaussian"]

Sampler = Callable[[Tensor, Tensor, Generator], Tensor]
"""(model output, the data's targets, generator) ↦ sampled targets."""


def categorical(output: Tensor, y: Tensor, generator: Generator, ignore_index: int = -100) -> Tensor:
    """Sample classes from the softmax over dimension 1 (the last one of an unbatched output).

    Args:
        output: Logits, [N, C, *positions] or [C].
        y: The data's classes, [N, *positions], or class probabilities.
        generator: Source of randomness on the output's device.
        ignore_index: Class that takes no part in the loss.

    Returns:
        Classes, [N, *positions]; -100 where ``y`` is ``ignore_index``, which may itself be a class that is sampled.
    """
    dim = 1 if output.ndim > 1 else 0
    probabilities = output.detach().float().softmax(dim).movedim(dim, -1)
    # Sampling from NaN fails, on a GPU fatally; a batch that is not finite is to be left to whoever judges it.
    flat = probabilities.reshape(-1, probabilities.shape[-1]).nan_to_num(nan=1.0 / probabilities.shape[-1])
    sampled = torch.multinomial(flat, 1, generator=generator).reshape(probabilities.shape[:-1])
    return sampled if y.is_floating_point() else torch.where(y == ignore_index, -100, sampled)


def bernoulli(output: Tensor, y: Tensor, generator: Generator) -> Tensor:
    """Sample zeros and ones from the sigmoid of logits, shaped like the output.

    Args:
        output: Logits.
        y: The data's targets, for their dtype.
        generator: Source of randomness on the output's device.

    Returns:
        Zeros and ones in the targets' dtype, shaped like the output.
    """
    return torch.bernoulli(output.detach().sigmoid().nan_to_num(nan=0.5), generator=generator).to(y.dtype)


def gaussian(output: Tensor, y: Tensor, generator: Generator) -> Tensor:
    """Sample around the output with variance ½, for which the squared error is the negative log-likelihood.

    Args:
        output: The model's output.
        y: Is not read.
        generator: Source of randomness on the output's device.

    Returns:
        Targets, shaped like the output.
    """
    noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    sampled: Tensor = output.detach() + noise * 0.5**0.5
    return sampled


def terms_per_datum(output: Tensor, y: Tensor, sampler: Sampler, averaged: bool) -> float | Tensor:
    """How many likelihood terms of a datum the loss averages: K for a mean over N·K terms, 1 for a sum.

    The curvature of a mean of K terms is 1/K of that of their sum, but a sampled gradient's square is 1/K² of it.
    Scaling the sampled loss by √K makes its gradients' second moment the curvature again.
    """
    if not averaged:
        return 1.0
    num_data = output.shape[0]
    if isinstance(sampler, partial) and sampler.func is categorical:
        if output.ndim == 1:
            return 1.0
        if y.is_floating_point():
            return output.numel() / (num_data * output.shape[1])
        counted: Tensor = (y != sampler.keywords["ignore_index"]).sum()
        return counted / num_data
    return output.numel() / num_data


def sampler_for(loss_fn: Callable[..., Tensor]) -> tuple[Sampler, bool]:
    """Find the predictive distribution that a loss belongs to.

    Args:
        loss_fn: ``F.cross_entropy``, ``F.binary_cross_entropy_with_logits``, ``F.mse_loss``, a ``partial`` of one,
            or one of their modules.

    Returns:
        The sampler, and whether the loss averages over all terms.

    Raises:
        ValueError: If the loss is none of them, or is weighted or smoothed and so no likelihood.
    """
    function, options = _unpack(loss_fn)
    for name in ("weight", "pos_weight"):
        if options.get(name) is not None:
            raise ValueError(_refusal(loss_fn, f"its {name} makes it no negative log-likelihood"))
    if options.get("label_smoothing"):
        raise ValueError(_refusal(loss_fn, "label_smoothing makes it no negative log-likelihood"))
    averaged = options.get("reduction", "mean") == "mean"
    if function is F.cross_entropy:
        return partial(categorical, ignore_index=options.get("ignore_index", -100)), averaged
    if function is F.binary_cross_entropy_with_logits:
        return bernoulli, averaged
    if function is F.mse_loss:
        return gaussian, averaged
    raise ValueError(_refusal(loss_fn, "it is not a loss whose distribution is known here"))


def loss_of_samples(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss for sampled targets: cross entropy then ignores -100 alone, whatever it ignored before."""
    function, options = _unpack(loss_fn)
    if function is F.cross_entropy:
        return partial(F.cross_entropy, reduction=options.get("reduction", "mean"))
    return loss_fn


def _unpack(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function in ``torch.nn.functional`` that a loss calls, and its options."""
    modules = {
        nn.CrossEntropyLoss: (F.cross_entropy, ("weight", "ignore_index", "reduction", "label_smoothing")),
        nn.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, ("weight", "pos_weight", "reduction")),
        nn.MSELoss: (F.mse_loss, ("reduction",)),
    }
    if isinstance(loss_fn, partial):
        function, options = _unpack(loss_fn.func)
        return function, {**options, **loss_fn.keywords}
    if type(loss_fn) in modules:
        function, names = modules[type(loss_fn)]
        return function, {name: getattr(loss_fn, name) for name in names}
    return loss_fn, {}


def _refusal(loss_fn: Any, why: str) -> str:
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return (
        f"Can't sample targets for the loss {name}: {why}. Pass sample_targets=f to Minibatch, with f(output, y, "
        "generator) -> targets; kfqn_ext.optim.targets has categorical, bernoulli and gaussian."
    )
