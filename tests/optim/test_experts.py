"""A mixture of experts, some of which get no datum in a step: what is said of these, and how often."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS


class Experts(nn.Module):
    """The router sends each datum to one of four layers, by weights that move."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(10, 4), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(10, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(1)
        chosen, found = p.argmax(1), torch.zeros(len(x), 16)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            found = found.index_add(0, rows, expert(x[rows]) * p[rows, i : i + 1])
        return self.last(found.tanh())


@pytest.mark.parametrize("make", [OnePassKBFGS, KBFGS])
def test_each_remark_is_made_once_for_a_layer(make: Any) -> None:
    torch.manual_seed(0)
    model, generator = Experts(), torch.Generator().manual_seed(0)
    optimizer = make(model, curvature_update_freq=1, lr=0.1)
    x = torch.randn(512, 10, generator=generator)
    y = (x @ torch.randn(10, 3, generator=generator)).argmax(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(60):
            rows = torch.randint(512, (12,), generator=generator)
            optimizer.step(Minibatch(model, F.cross_entropy, x[rows], y[rows]))
    messages = [str(w.message) for w in said]
    assert any("without a datum" in message for message in messages)
    kinds = [tuple(w for w in message.split() if not w[0].isdigit()) for message in messages]
    assert len(set(kinds)) == len(kinds)
