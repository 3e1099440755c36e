"""What is trained: a network, its data, its loss; and the minibatches, which are the same for every optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.untuned.data import Source
from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.targets import Sampler
from workloads.data import Data, Split

_BATCH = 512


@dataclass(frozen=True)
class SmallProblem:
    """One problem.

    Attributes:
        title: What it is, for a table's reader.
        build: Makes the network; torch's seed decides its parameters.
        data: Training and validation data.
        loss: (output, target) ↦ mean over data.
        batch_size: Data in a minibatch.
        sampler: Draws targets from the network's distribution where the loss alone does not tell which that is.
        samples: Whether such targets can be drawn at all; KFAC needs them.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[Source], Data]
    loss: Callable[[Any, Tensor], Tensor]
    batch_size: int
    sampler: Sampler | None = None
    samples: bool = True


def minibatches(problem: SmallProblem, model: nn.Module, data: Data, seed: int) -> Iterator[Minibatch]:
    """Shuffled epochs without end, from a generator of their own; what does not fill a minibatch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data.train), generator=generator)
        for x, y in data.train.shuffled(order, problem.batch_size):
            yield Minibatch(model, problem.loss, x, y, problem.sampler)


@torch.no_grad()
def mean_loss(problem: SmallProblem, model: nn.Module, split: Split) -> float:
    """Mean loss over all data of a kind, in evaluation mode; noise in the network is the same each time."""
    model.eval()
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for x, y in split.in_order(_BATCH):
            total += len(x) * problem.loss(model(x), y).item()
    model.train()
    return total / len(split)
