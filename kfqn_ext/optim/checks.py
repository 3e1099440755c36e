"""Is the step loop used as it can work? One message for each misuse: what was found, and the way out."""

from typing import Any

from torch import Tensor, distributed
from torch.optim import Optimizer

from kfqn_ext.optim.measure import Measurement
from kfqn_ext.optim.recipe import SecondPass

NOTHING_MEASURED = (
    "step() has nothing measured to work with. Pass a closure, step(Minibatch(model, loss_fn, x, y)), or run the "
    "backward pass inside `with optimizer.first_pass():`."
)


def surroundings(optimizer: Optimizer) -> None:
    """Raise inside a trainer's wrapper (RuntimeError), and in several processes (NotImplementedError)."""
    if "state" not in vars(optimizer):  # Lightning's wrapper inherits from what it wraps and shares no attribute
        raise RuntimeError(
            "first_pass() was called on a trainer's wrapper, which keeps what it measures from the optimizer. Call "
            "it on the optimizer inside: optimizer.optimizer.first_pass(), and second_pass() alike."
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise NotImplementedError(
            f"{type(optimizer).__name__} in {distributed.get_world_size()} processes: each would learn its curvature "
            "from its own share of the data, and the copies of the model would drift apart. Train in one process; "
            "the quantities of KBFGSQuantities can be averaged over processes, weighted by num_data."
        )


def closure(given: Any, optimizer: str, second_pass: SecondPass, share: float) -> None:
    """Raise a TypeError where a closure can't do what its second pass needs."""
    if second_pass.sampled and not hasattr(given, "sampled"):
        raise TypeError(
            f"{optimizer} samples targets from the model's predictive distribution, which a plain "
            "closure can't. Pass a Minibatch, or use first_pass() and second_pass()."
        )
    if second_pass is not SecondPass.NONE and share < 1 and not hasattr(given, "part"):
        raise TypeError(
            f"second_pass_fraction={share}, but a plain closure can't run a part of its minibatch. Pass a "
            "Minibatch, or run the first data of the minibatch yourself in second_pass()."
        )


def first_pass(measurement: Measurement) -> None:
    """Raise where the loss's scale is not known (RuntimeError), and where no batch had a datum (ValueError)."""
    loss_scale(measurement)
    if measurement.only_empty_batches:
        raise ValueError("The batch is empty: there is no datum to learn from. Drop empty batches.")


def loss_scale(measurement: Measurement) -> None:
    """Raise a RuntimeError where the loss's scale is not known."""
    if measurement.lacks_loss_scale:
        raise RuntimeError(
            "Gradients arrived in float16, and nothing says how the loss was scaled. Without a closure, use "
            "first_pass(loss_scale=scaler.get_scale()) and second_pass(loss_scale=scaler.get_scale()), with "
            "loss_scale=1.0 where it is not scaled."
        )


def gradients(grads: list[Tensor]) -> None:
    """Raise a RuntimeError where there is none, or a sparse one."""
    if not grads:
        raise RuntimeError(
            "No parameter has a gradient. The closure must run loss.backward(); without a closure, run it before "
            "step(), inside `with optimizer.first_pass():`."
        )
    if any(g.is_sparse for g in grads):
        raise RuntimeError("Sparse gradients are not supported: build embeddings with sparse=False.")
