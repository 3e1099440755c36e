"""Where lengths are set and the damping is relative, a loss in another unit is trained by the same steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from tests.cases import assert_close
from tests.optim.family import FAMILY, rows

F64 = torch.float64
UNITS = pytest.mark.parametrize("c", [1e-4, 1e4])
FREE = rows(lambda member: member.sets_length and member.relative)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 3)
    ).double()


def targets(output: Tensor, *unused: object) -> Tensor:
    return output.detach().argmin(dim=1)


def path(name: str, c: float, steps: int) -> list[Tensor]:
    """All parameters after each step."""
    model = net()
    optimizer, found = FAMILY[name].without_eps().make(model, lr=0.1, damping=0.3, weight_decay=0.01), []
    for k in range(steps):
        x = torch.randn(9, 2, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, lambda z, y: c * F.cross_entropy(z, y), x, torch.arange(9) % 3, targets))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


@UNITS
@pytest.mark.parametrize("name", [name for name in FREE if not FAMILY[name].secant_G])
def test_it_changes_no_step(name: str, c: float) -> None:
    for got, want in zip(path(name, c, 12), path(name, 1.0, 12), strict=True):
        assert_close(got, want, 1e-9)


@UNITS
@pytest.mark.parametrize("name", [name for name in FREE if FAMILY[name].secant_G])
def test_it_changes_no_first_step_where_pairs_have_the_unit_of_the_loss(name: str, c: float) -> None:
    """Later ones it does, a little: Γ, which the damping is a part of, has that unit's square."""
    assert_close(path(name, c, 1)[0], path(name, 1.0, 1)[0], 1e-9)


def test_it_changes_steps_as_printed() -> None:
    assert not torch.allclose(path("KBFGS", 1e4, 1)[0], path("KBFGS", 1.0, 1)[0], rtol=0.1)
