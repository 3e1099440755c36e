"""The closure that every method's ``step`` takes."""

from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from workloads.losses import Loss


def minibatch(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Minibatch:
    """One minibatch: its loss, and for KFAC the distribution to sample targets from."""
    return Minibatch(model, loss.mean, x, y, loss.sample)
