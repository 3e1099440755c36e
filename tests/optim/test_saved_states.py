"""States that an earlier version saved are loaded, and training goes on as it would have there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.linalg import splits
from kfqn_ext.optim import KBFGS, KBFGS20, KBFGSL, KBFGSL20, KFAC, KroneckerOptimizer, Minibatch, ProvableKBFGSL
from kfqn_ext.optim.inverses import HessianActionLBFGS
from tests.cases import assert_close

# Written by version 0.1.0 before its rules were renamed: four steps, the state dictionaries, four more steps.
LAYOUT_1 = torch.load(Path(__file__).parent / "saved" / "layout_1.pt", weights_only=True)
C: dict[str, Any] = {"lr": 0.1, "damping": 0.5}
MAKE: dict[str, Callable[[nn.Module], KroneckerOptimizer]] = {
    "KBFGS": lambda m: KBFGS(m, **C),
    "KBFGSL": lambda m: KBFGSL(m, history_size=2, **C),
    "KBFGS20": lambda m: KBFGS20(m, **C),
    "KBFGSL20": lambda m: KBFGSL20(m, history_size=2, **C),
    "ProvableKBFGSL": lambda m: ProvableKBFGSL(m, lr=0.1, history_size=2),
    "KFAC": lambda m: KFAC(m, stats_update_freq=lambda k: 1 + k % 2, **C),
    "trace split": lambda m: KroneckerOptimizer(m, recipe=replace(KBFGS.recipe, split=splits.trace), **C),
    "limited H_A": lambda m: KroneckerOptimizer(
        m, recipe=replace(KBFGS.recipe, input_inverse=HessianActionLBFGS(history_size=2)), **C
    ),
}


def second_best(output: Tensor, *unused: Any) -> Tensor:
    return output.topk(2, dim=1).indices[:, 1]


@pytest.mark.parametrize("name", MAKE)
def test_layout_1(name: str) -> None:
    saved = LAYOUT_1[name]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = MAKE[name](model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for k in range(4, 8):
        x = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(6) % 3, second_best))
    for key, value in model.state_dict().items():
        assert_close(value, saved["after"][key], 1e-10)


def test_all_of_them_are_loaded() -> None:
    assert set(MAKE) == set(LAYOUT_1)
