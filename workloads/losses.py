"""The paper's losses, each with the distribution whose log-likelihood it is: KFAC samples targets from that."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kfqn_ext.optim.targets import bernoulli, categorical


@dataclass(frozen=True)
class Loss:
    """A loss, and its predictive distribution.

    Attributes:
        mean: (output, target) ↦ mean over data of the loss, which is a sum over the entries of one datum.
        sample: (output, target, generator) ↦ targets drawn from the predictive distribution.
    """

    mean: Callable[[Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Generator], Tensor]


def _binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / target.shape[0]


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    # Half of it: the negative log-likelihood of a unit-variance normal distribution, up to a constant.
    return 0.5 * F.mse_loss(output, target, reduction="sum") / target.shape[0]


def _unit_normal(output: Tensor, target: Tensor, generator: Generator) -> Tensor:
    return output.detach() + torch.randn(output.shape, generator=generator, device=output.device)


BINARY_CROSS_ENTROPY = Loss(_binary_cross_entropy, bernoulli)
SQUARED_ERROR = Loss(_squared_error, _unit_normal)
CROSS_ENTROPY = Loss(F.cross_entropy, categorical)
