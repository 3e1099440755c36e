"""The loop of any ``torch.optim`` optimizer, and what it leaves: for suites about what is learned from it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS
from tests.cases import assert_close

F64 = torch.float64
Interlude = Callable[[nn.Module, Any, Tensor, Tensor], Any]
"""What a loop does beside its passes, with (model, optimizer, x, y); what it returns lives until the step is done."""


def net() -> Any:
    """Groups, a layer with locations, and parameters without a block; nothing that a forward pass changes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(2), nn.Linear(9, 5), nn.LayerNorm(5), nn.Flatten(),
        nn.Linear(20, 3),
    ).double()  # fmt: skip


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(12, 2, 5, 5, dtype=F64, generator=generator), torch.arange(12) % 3


def nothing(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """No interlude."""


def backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range = range(3),
    passes: Interlude = backward,
    before: Interlude = nothing,
    after: Interlude = nothing,
) -> None:
    for k in steps:
        interludes = [before(model, optimizer, *batch(k))]
        passes(model, optimizer, *batch(k))
        interludes.append(after(model, optimizer, *batch(k)))
        optimizer.step()
        optimizer.zero_grad()


def trained(*args: Any, **interludes: Any) -> dict[str, Any]:
    """What three steps leave, with options of the loop."""
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, *args, **interludes)
    return left(model, optimizer)


def left(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that training has changed."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def close(got: Any, want: Any, tol: float = 1e-10) -> None:
    """Compare what is left, each tensor to ``tol`` of its largest entry."""
    for name, value in want["model"].items():
        assert_close(got["model"][name], value, tol)
    got, want = got["optimizer"]["state"], want["optimizer"]["state"]
    assert got.keys() == want.keys()
    for i, state in want.items():
        assert got[i].keys() == state.keys()
        for key, value in state.items():
            try:
                assert_close(got[i][key], value, tol)
            except AssertionError as error:
                raise AssertionError(f"{key} of parameter {i}: {error}") from None
