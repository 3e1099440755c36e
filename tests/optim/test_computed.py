"""One pass whose inverses are computed: KFAC's factors of the data's own targets."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext import OnePassKBFGS
from kfqn_ext.optim import running_mean
from kfqn_ext.optim.inverses import FisherInverse, MovingInverse
from kfqn_ext.optim.recipe import SecondPass
from tests.cases import assert_close

F64 = torch.float64
EPS, BETA = 0.1, 0.9


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Homogeneous rows a_t of every datum, [N, |T|, d_in]."""
    a = F.unfold(x, conv.kernel_size, padding=conv.padding).mT
    return torch.cat((a, torch.ones_like(a[..., :1])), -1)


def factors(conv: nn.Conv2d, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A, and Γ in units of its mean eigenvalue; g of each datum's own loss, [N, d_out, |T|]."""
    a = patches(x, conv)
    A = sum(a_n.mT @ a_n for a_n in a) / len(a)
    Gamma = sum(g_n @ g_n.mT for g_n in g)
    return A, Gamma * len(Gamma) / Gamma.trace()


def test_both_are_inverses_of_moving_averages() -> None:
    """Of A + ε tr(A)/d I, and of Γ̂ + ε I."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    optimizer = OnePassKBFGS(model, recipe=OnePassKBFGS.recipe_computed, curvature_update_freq=1, damping=EPS, lr=0.05)
    kept: list[Tensor] = []
    for _ in range(4):
        x, t = torch.randn(6, 2, 4, 4, dtype=F64), torch.randint(4, (6,))
        h = conv(x)
        (g,) = torch.autograd.grad(F.cross_entropy(model[1:](h), t, reduction="sum"), h)
        new = factors(conv, x, g.flatten(2).detach())
        kept = [BETA * old + (1 - BETA) * M for old, M in zip(kept, new, strict=True)] if kept else list(new)
        F.cross_entropy(model(x), t).backward()
        optimizer.step()
        optimizer.zero_grad()
        H_A, H_G = optimizer.inverses(conv.weight).dense()
        mean = kept[0].trace() / len(kept[0])
        assert_close(H_A, torch.linalg.inv(kept[0] + EPS * mean * torch.eye(19, dtype=F64)), 1e-10)
        assert_close(H_G, torch.linalg.inv(kept[1] + EPS * torch.eye(3, dtype=F64)), 1e-10)


@pytest.mark.parametrize("rule", [MovingInverse, FisherInverse])
def test_the_decay_may_be_a_function_and_is_checked(rule: type) -> None:
    assert callable(rule(running_mean()).decay)
    with pytest.raises(ValueError, match="decay"):
        rule(1.5)


def test_it_needs_no_second_pass() -> None:
    assert OnePassKBFGS.recipe_computed.second_pass is SecondPass.NONE


def test_it_trains_digits_better_than_the_learned_form() -> None:
    """In the same 100 steps, on average over three seeds."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, t = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)

    def loss(recipe: object, seed: int) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        optimizer = OnePassKBFGS(model, recipe=recipe)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        for _ in range(100):
            rows = torch.randint(len(x), (128,))
            F.cross_entropy(model(x[rows]), t[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return F.cross_entropy(model(x), t).item()

    learned, computed = (
        sum(loss(recipe, seed) for seed in range(3)) for recipe in (OnePassKBFGS.recipe, OnePassKBFGS.recipe_computed)
    )
    assert computed < 0.9 * learned
