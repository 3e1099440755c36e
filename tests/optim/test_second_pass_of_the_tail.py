"""A second pass that runs what comes behind the first layer that learns alone, from what that layer has read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS
from tests.cases import assert_close


@pytest.mark.parametrize("make", [KBFGS, KBFGS.as_printed])
def test_the_pair_is_of_the_layer_s_own_move(make: Any) -> None:
    """Δh̄ and Δ∂h̄ with all layers before it held where they were."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).double()
    head = nn.Linear(36, 3).double()
    optimizer = make(nn.Sequential(body, head), curvature_update_freq=1)
    x, y = torch.randn(8, 2, 5, 5, dtype=torch.float64), torch.arange(8) % 3

    def means(features: Tensor) -> tuple[Tensor, Tensor]:
        h = head(features)
        (g,) = torch.autograd.grad(F.cross_entropy(h, y), h)
        return h.detach().mean(0), g.sum(0)

    s = y_G = torch.zeros(3, dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        with optimizer.first_pass():
            features = body(x)
            F.cross_entropy(head(features), y).backward()
        features = features.detach()
        before = means(features)
        optimizer.step()
        assert optimizer.second_pass_layers == [head]
        with optimizer.second_pass():
            F.cross_entropy(head(features), y).backward()
        after = means(features)
        s, y_G = (0.9 * old + 0.1 * (b - a) for old, a, b in zip((s, y_G), before, after, strict=True))
        assert_close(optimizer.state[head.weight]["s_G"], s, 1e-12)
        assert_close(optimizer.state[head.weight]["y_G"], y_G, 1e-12)
    assert optimizer.state[head.weight]["pairs_seen_G"].tolist()[0] == 4
