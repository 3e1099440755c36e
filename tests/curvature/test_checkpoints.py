"""Checkpoints change no curvature, and a graph that is missing is not taken for a curvature of zero."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from kfqn_ext.curvature import curvature_ladder, estimate_curvature, exact_block, exact_ggn_block
from tests.curvature.test_entry import PUBLIC, same

X, Y = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2


class Net(nn.Module):
    """A block that is run in some way, and a head. ``twice``: the block's layer is called in the head too."""

    def __init__(self, run: Any = None, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.drop, self.last, self.run, self.twice = nn.Dropout(0.2), nn.Linear(3, 2), run, twice

    def block(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x).tanh()))).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x) if self.run is None else self.run(self.block, x)
        return self.last(h + self.second(self.first(x)) if self.twice else h)


def reentrant(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def selective(function: Any, *args: Any) -> Any:
    def contexts() -> Any:
        save = [torch.ops.aten.mm.default]
        return checkpoints.create_selective_checkpoint_contexts(save)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Any] = {
    "reentrant": reentrant,
    "not reentrant": lambda function, *args: checkpoint(function, *args, use_reentrant=False),
    "by the module's name": lambda f, *args: checkpoints.checkpoint(f, *args, use_reentrant=False),
    "one in another": lambda f, *args: reentrant(lambda *a: checkpoint(f, *a, use_reentrant=False), *args),
    "in parts": lambda f, *args: checkpoints.checkpoint_sequential(
        nn.Sequential(f_module(f)), 1, *args, use_reentrant=False
    ),
    "selective": selective,
}


def f_module(function: Any) -> nn.Module:
    module = nn.Module()
    module.forward = function
    return module


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_curvature_is_that_of_the_model_without_checkpoints(name: str, way: str, training: bool) -> None:
    if training and name == "exact_output_hessians":
        pytest.skip("data are coupled")
    plain, checkpointed = (Net(run).train(training) for run in (None, WAYS[way]))
    for layer in ("first", "second", "last"):
        found, expected = (PUBLIC[name](model, cross_entropy, X, Y, layer) for model in (checkpointed, plain))
        assert same(found, expected), layer
    assert checkpoints.CheckpointFunction is torch.utils.checkpoint.CheckpointFunction
    loss = cross_entropy(checkpointed(X.clone().requires_grad_()), Y)  # checkpoints are what they were
    loss.backward()
    assert checkpointed.first.weight.grad is not None


@pytest.mark.parametrize("twice", [False, True])
def test_in_the_models_own_dtype(twice: bool) -> None:
    models = [Net(run, twice).eval() for run in (None, *WAYS.values())]
    blocks = [exact_block(model, cross_entropy, X, Y, "first", dtype=None) for model in models]
    assert blocks[0].any() and all(torch.equal(block, blocks[0]) for block in blocks)


def no_grad(function: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return function(x)


class OwnCheckpoint(torch.autograd.Function):
    """As other libraries have them: parameters are found in the backward pass, which repeats the function."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Any:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("never reached")


LOST: dict[str, Any] = {
    "no_grad": no_grad,
    "detached": lambda function, x: function(x).detach(),
    "a checkpoint of one's own": OwnCheckpoint.apply,
}


@pytest.mark.parametrize("way", LOST)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_missing_graph_is_named(name: str, way: str) -> None:
    model = Net(LOST[way]).eval()
    with pytest.raises(ValueError, match="no graph that reaches layer first.*no_grad.*detach"):
        PUBLIC[name](model, cross_entropy, X, Y, "first")
    assert PUBLIC[name](model, cross_entropy, X, Y, "last") is not None


@pytest.mark.parametrize("function", [exact_block, exact_ggn_block])
def test_also_where_the_loss_has_a_graph_of_its_own(function: Any) -> None:
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="no graph that reaches layer first"):
        function(Net(no_grad).eval(), lambda z, y: scale * cross_entropy(z, y), X, Y, "first")


@pytest.mark.parametrize("function", [curvature_ladder, estimate_curvature])
def test_such_layers_are_left_out_where_none_is_named(function: Any) -> None:
    report = function(Net(no_grad).eval(), cross_entropy, X, Y, progress=False)
    assert [layer.name for layer in report] == ["last"]
    assert "no graph that reaches layer first" in str(report) and "layer second" in str(report)


def test_a_curvature_that_is_zero_is_none_that_is_missing() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    block = exact_block(model, lambda z, y: z.sum(), X, Y, "0")
    assert block.shape == (8, 8) and not block.any()
