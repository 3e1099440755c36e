"""H_A of the forms without tuning is that of many minibatches, each with fewer data than the layer has inputs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS
from kfqn_ext.optim.inverses import StepHessianAction

D, N, STEPS = 60, 20, 80


def error(rule: StepHessianAction, seed: int) -> float:
    """‖M (H_A - (A + λ_A I)⁻¹)‖ / ‖M (A + λ_A I)⁻¹‖ with A of all data: in M's rows H_A is used."""
    torch.manual_seed(seed)
    model = nn.Linear(D, 5, bias=False).double()
    optimizer = OnePassKBFGS(
        model, lr=0.0, damping=0.1, curvature_update_freq=1, recipe=replace(OnePassKBFGS.recipe, input_inverse=rule)
    )
    scale, targets = torch.linspace(0.2, 2.0, D).double(), torch.randn(D, 5).double()
    for _ in range(STEPS):
        x = torch.randn(N, D).double() * scale
        (model(x) - x @ targets).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.weight]
    A = torch.diag(scale.square())
    exact = torch.linalg.inv(A + 0.1 * A.trace() / D * torch.eye(D).double())
    return relative(state["momentum"] @ state["H_A"], state["momentum"] @ exact)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("seed", range(3))
def test_h_a_is_nearer_to_that_of_all_data(seed: int) -> None:
    averaged, last = error(StepHessianAction(), seed), error(StepHessianAction(decay=0.0), seed)
    assert averaged < 0.8 * last
