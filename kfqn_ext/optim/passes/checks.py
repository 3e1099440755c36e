"""Is the step loop used as it can work? One message for each misuse: what was found, and the way out."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from kfqn_ext._torch import is_divided
from kfqn_ext.extensions import has_backpacks_hooks
from kfqn_ext.optim.groups.plan import Layer
from kfqn_ext.optim.inverses import OutputInverse
from kfqn_ext.optim.passes.gradient_watch import GradientWatch
from kfqn_ext.optim.passes.measurement import Measurement, Results
from kfqn_ext.optim.recipe import Recipe, SecondPass


def wrapper(optimizer: Optimizer) -> None:
    """Raise a RuntimeError inside a trainer's wrapper."""
    if "state" not in vars(optimizer):  # Lightning's wrapper inherits from what it wraps and shares no attribute
        raise RuntimeError(
            "first_pass() was called on a trainer's wrapper, which keeps what it measures from the optimizer. Call "
            "it on the optimizer inside: optimizer.optimizer.first_pass(), and second_pass() alike."
        )


def processes(optimizer: Optimizer, is_chosen: bool) -> None:
    """Raise a RuntimeError in several processes of which nobody has said how they train."""
    if (
        not is_chosen
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        name, size = type(optimizer).__name__, distributed.get_world_size()
        raise RuntimeError(
            f"{name} in {size} processes, and nothing says whether they train one model. If they do, build it on the "
            f"wrapper, {name}(DistributedDataParallel(model)), or give it the group, {name}(model, "
            "process_group=torch.distributed.group.WORLD). If each trains a model of its own, give it a group of "
            "itself alone: process_group=torch.distributed.new_group([rank], use_local_synchronization=True)."
        )


def hooks(layers: Iterable[Layer], optimizer: str) -> None:
    """Raise a ValueError where ``backpack.extend`` was called on layers, whose hooks then take the place of ours."""
    names = [layer.name for layer in layers if has_backpacks_hooks(layer.module)]
    if names:
        raise ValueError(
            f"backpack.extend was called on the model (layers {', '.join(names)}). {optimizer} needs the hooks of "
            "kfqn_ext.extend, which give way to BackPACK's. Leave backpack.extend out: BackPACK's first-order "
            "extensions run without. Or call kfqn_ext.unextend(model), which takes both kinds of hooks off, and then "
            "build the optimizer; where it is built, call kfqn_ext.extend(model)."
        )


def closure(given: Any, optimizer: str, second_pass: SecondPass, fraction: float) -> None:
    """Raise a TypeError where a closure can't do what its second pass needs, before anything has run."""
    if second_pass.sampled and not hasattr(given, "sampled"):
        raise TypeError(
            f"{optimizer} samples targets from the model's predictive distribution, which a plain "
            "closure can't. Pass a Minibatch, or use first_pass() and second_pass()."
        )
    if second_pass is SecondPass.NONE or fraction == 1:
        return
    if not hasattr(given, "fraction"):
        raise TypeError(
            f"second_pass_fraction={fraction}, but a plain closure can't run a part of its minibatch. Pass a "
            "Minibatch, or run the first data of the minibatch yourself in second_pass()."
        )
    given.fraction(fraction)  # raises where its data can't be cut


def loss(given: Any) -> Tensor:
    """The loss that step_cap compares with, as a tensor []; raise a RuntimeError where it is none."""
    if isinstance(given, Tensor) and given.numel() == 1:
        return given.detach().reshape(())
    if isinstance(given, int | float):
        return torch.full((), float(given), dtype=torch.float64, device="cpu")
    found = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    raise RuntimeError(
        f"step_cap compares the step with the loss: pass a closure that returns the loss, one number, not {found}."
    )


@contextmanager
def reaching(due: Sequence[Layer], second: Measurement) -> Iterator[None]:
    """Say which layers a second pass should have called, where it fails as it called none of them (RuntimeError)."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error) or not second.reached_nothing:
            raise
        raise RuntimeError(
            f"The second pass called none of the layers that are due ({_names(due)}): they can't be measured where "
            "they are used through F.linear, or were compiled before they were extended. Call the modules, or "
            "leave these parameters to a torch.optim optimizer."
        ) from error


def second_pass(due: Sequence[Layer], measurement: Measurement) -> None:
    """Raise a RuntimeError where it reached none of the layers that are due, or the loss's scale is not known."""
    loss_scale(measurement)
    if measurement.reached_nothing and not measurement.only_empty_batches:
        raise RuntimeError(
            f"The second pass reached none of the layers that are due ({_names(due)}): nothing was learned. Its body "
            "must repeat the forward and the backward pass of the minibatch, loss.backward() included. Enter it only "
            "where second_pass_due is true."
        )


def own_forward_pass(first: Results) -> None:
    """Raise a RuntimeError where a closure ran its backward pass through a forward pass that ran outside."""
    if first and first.reading is not None and not first.reading.called:
        raise RuntimeError(
            "The closure ran loss.backward(), and the forward pass had run before, outside of it. It is called a "
            "second time, after the parameters have moved, and must then compute the loss anew: evaluate the model "
            "inside the closure, as for torch.optim.LBFGS."
        )


def _names(layers: Sequence[Layer]) -> str:
    return ", ".join(layer.name for layer in layers)


def first_pass(measurement: Measurement, gradients: GradientWatch, alone: bool) -> None:
    """Raise where no backward pass ran or the loss's scale is not known (RuntimeError); for no datum, ValueError.

    Where a process is not ``alone``, others may have data.
    """
    if not gradients.changed:
        raise RuntimeError("No gradient changed in the first pass: it must run loss.backward().")
    loss_scale(measurement)
    if alone and measurement.only_empty_batches:
        raise ValueError("The batch is empty: there is no datum to learn from. Drop empty batches.")


def loss_scale(measurement: Measurement) -> None:
    """Raise a RuntimeError where the loss's scale is not known."""
    if measurement.lacks_loss_scale:
        raise RuntimeError(
            "Gradients arrived in float16, and nothing says how the loss was scaled. Without a closure, use "
            "first_pass(loss_scale=scaler.get_scale()) and second_pass(loss_scale=scaler.get_scale()), with "
            "loss_scale=1.0 where it is not scaled."
        )


def options(step_cap: float | None, fraction: float, recipe: Recipe) -> None:
    """Raise a ValueError where one of them is out of range, or has no meaning for a recipe."""
    if step_cap is not None and recipe.length.is_set:
        raise ValueError(
            f"step_cap={step_cap} bounds lengths that are computed, and this recipe sets them "
            f"({recipe.length}): a smaller lr makes steps shorter. Leave step_cap out, or build the paper's form "
            "by as_printed(...)."
        )
    if step_cap is not None and not step_cap > 0:
        raise ValueError(f"Invalid step_cap: {step_cap}. It must be positive, or None for no cap.")
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid second_pass_fraction: {fraction}. It must be in (0, 1].")


def can_be_sharded(recipe: Recipe, name: str, by_fsdp: bool) -> None:
    """Raise a ValueError where one process can't keep what others need in their backward pass."""
    rule = type(recipe.output_inverse)
    what, instead = ("shard_state=True", "shard_state=False")
    if by_fsdp:
        what, instead = "a model of fully_shard, whose state is divided too", "DistributedDataParallel"
    if rule.probe is not OutputInverse.probe and recipe.output_inverse.num_directions == 0:
        raise ValueError(
            f"{what}: {name} looks at Γ in directions that {rule.__name__} chooses from state, and it does not say how "
            "many. Processes without that state can't make room for them. Give it the property num_directions, or use "
            f"{instead}."
        )


def empty_closure(gradients: GradientWatch) -> None:
    """Raise a RuntimeError where a closure after a first pass ran another backward pass."""
    if gradients.changed:
        raise RuntimeError(
            "step(closure) after first_pass(): the minibatch was measured already, and the closure ran another "
            "backward pass. Use step() after first_pass(), or step(closure) alone."
        )


def step(parameters: list[Tensor], has_measurements: bool, lacks_loss: bool) -> None:
    """Raise a RuntimeError where a step has nothing to work with."""
    _gradients([p.grad for p in parameters if p.grad is not None], any(p.requires_grad for p in parameters))
    if not has_measurements:
        raise RuntimeError(
            "step() has nothing measured to work with. Pass a closure, step(Minibatch(model, loss_fn, x, y)), or run "
            "the backward pass inside `with optimizer.first_pass():`."
        )
    if lacks_loss:
        raise RuntimeError("step_cap compares the step with the loss: pass a closure that returns the loss.")


def averaged(grads: list[Tensor], are_divided: bool) -> None:
    """Raise a RuntimeError where processes share a model, and some gradient is none of theirs together."""
    found = [list(g.shape) for g in grads if are_divided and not is_divided(g)]
    if found:
        raise RuntimeError(
            f"Parameters of shapes {found} have gradients and are outside of all units of fully_shard: nobody averages "
            "these over processes. They were frozen when the optimizer was built; keep them frozen, or call "
            "fully_shard on the whole model before it is built."
        )


def _gradients(grads: list[Tensor], are_trained: bool) -> None:
    """Raise a RuntimeError where there is none, or a sparse one."""
    if not grads and not are_trained:
        raise RuntimeError(
            "There is nothing to train: requires_grad is False for all parameters of the optimizer. Unfreeze some with "
            "requires_grad_(True), or call step() where some are trained alone."
        )
    if not grads:
        raise RuntimeError(
            "No parameter has a gradient. The closure must run loss.backward(); without a closure, run it before "
            "step(), inside `with optimizer.first_pass():`."
        )
    if any(g.is_sparse for g in grads):
        raise RuntimeError("Sparse gradients are not supported: build embeddings with sparse=False.")
