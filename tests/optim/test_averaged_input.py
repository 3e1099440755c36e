"""H_A of the forms without tuning is that of many minibatches, each with fewer data than the layer has inputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS
from kfqn_ext.optim.inverses import FisherAction, StepHessianAction
from tests.optim.plain_loop import left, net, train
from tests.optim.test_resume import assert_identical

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


@pytest.mark.parametrize(("cell", "rule"), [("input_inverse", StepHessianAction), ("output_inverse", FisherAction)])
def test_the_average_follows_a_function_of_the_step(cell: str, rule: Callable[..., Any]) -> None:
    def trained(decay: Any) -> Any:
        model = net()
        optimizer = OnePassKBFGS(model, recipe=replace(OnePassKBFGS.recipe, **{cell: rule(decay)}))
        train(model, optimizer)
        return left(model, optimizer)

    constant, followed = trained(0.5), trained(lambda k: 0.5)
    assert_identical(followed, constant)
    with pytest.raises(AssertionError):
        assert_identical(trained(lambda k: 0.5 if k < 3 else 0.9), constant)


@pytest.mark.parametrize("number", [-1, 1.0, True, None])
@pytest.mark.parametrize("rule", [StepHessianAction, FisherAction])
def test_no_number_of_directions(rule: Callable[..., Any], number: Any) -> None:
    assert rule(num_random=0).num_random == 0
    with pytest.raises(ValueError, match="Invalid num_random: .* an integer of at least 0"):
        rule(num_random=number)
