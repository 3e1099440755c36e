"""KFAC from one pass, with the data's own targets. Its dense twin is in the family's."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from kfqn_ext import KFACFactors, OnePassKBFGS, OnePassKFAC


def test_it_trains_digits_better_than_the_learned_form() -> None:
    """In the same 100 steps, on average over three seeds."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, t = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)

    def loss(row: type[OnePassKBFGS | OnePassKFAC], seed: int) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        optimizer = row(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        for _ in range(100):
            rows = torch.randint(len(x), (128,))
            F.cross_entropy(model(x[rows]), t[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return F.cross_entropy(model(x), t).item()

    learned, computed = (sum(loss(row, seed) for seed in range(3)) for row in (OnePassKBFGS, OnePassKFAC))
    assert computed < 0.9 * learned


def test_inverses_are_recomputed_when_they_are_due() -> None:
    """Every T₂ steps, of factors that follow every T₁."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = OnePassKFAC(model, stats_update_freq=2, inverse_update_freq=4)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(9):
        F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[model.weight]
        kept.append((state["A"].clone(), state["H_A"].clone()))
    moved = [tuple(not torch.equal(*pair) for pair in zip(*two, strict=True)) for two in pairwise(kept)]
    assert [k for k, (A, _) in enumerate(moved, start=2) if A] == [2, 4, 6, 8]
    assert [k for k, (_, H) in enumerate(moved, start=2) if H] == [4, 8]


def test_a_due_pass_measures_each_layer_once() -> None:
    """The damping's trace is that of the A that is kept: no second extension reads the inputs."""
    assert OnePassKFAC.recipe.first == {KFACFactors}
