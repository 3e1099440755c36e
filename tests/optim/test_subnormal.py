"""No state decays to subnormal numbers, with which a CPU's products take up to sixty times as long."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.linalg import flush_
from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY, one_per, rows


def make(name: str, model: nn.Module) -> Any:
    return FAMILY[name].make(model, lr=0.01)


def subnormal(x: Tensor) -> Tensor:
    return (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flush_keeps_what_counts(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.0, tiny / 8, -tiny, tiny * 2.0**39, 1e-20, -1.0, float("inf"), float("nan")], dtype=dtype)
    want = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-20, -1.0, float("inf"), float("nan")], dtype=dtype)
    assert flush_(x) is x
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)


AVERAGES = ("momentum", "s_G", "y_G", "A", "Omega", "Gamma")


@pytest.mark.parametrize("name", one_per(lambda member: member.samples))  # which average pairs, or Fisher factors
def test_a_unit_that_dies_leaves_no_subnormal_numbers(name: str) -> None:
    """After the third step one unit is never active and one input always zero; then hundreds of steps of decay.

    To save two hundred steps, averages are shrunk to where these would have brought them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = make(name, model)
    for k in range(440):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(k))
        if k >= 3:
            x[:, 0] = 0.0
            with torch.no_grad():
                model[1].bias[0], model[1].weight[0] = -100.0, 0.0
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3))
        if k == 3:
            for state in optimizer.state.values():
                for key in state.keys() & set(AVERAGES):
                    state[key] *= 1e-21
        if k >= 240 and k % 10 == 0:
            found = {
                f"{key} {list(p.shape)}": int(subnormal(v).sum())
                for p, state in optimizer.state.items()
                for key, v in state.items()
                if v.is_floating_point() and subnormal(v).any()
            }
            assert not found, (k, found)


@pytest.mark.parametrize(
    "name", one_per(lambda member: type(member.recipe.output_inverse), rows(lambda member: member.secant_G))
)
def test_an_output_that_is_no_longer_used_leaves_none(name: str) -> None:
    """In the averages of pairs: its entries shrink, while the others bring news."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(name, model)
    for k in range(150):
        weight = torch.ones(3) if k < 3 else torch.tensor([1.0, 1.0, 0.0])
        optimizer.step(Minibatch(model, lambda h, w: (w * (h - 1.0).square()).mean(), torch.randn(8, 4), weight))
        state = optimizer.state[model.weight]
        if k == 3:
            assert state["y_G"].all()
            for key in ("s_G", "y_G", "momentum"):
                state[key][2] *= 1e-33
        assert not any(subnormal(state[key]).any() for key in ("s_G", "y_G")), k
    assert state["y_G"][:2].all() and not state["y_G"][2]


def test_without_flushing_there_would_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("descent", "inverses.averages", "inverses.secant"):
        monkeypatch.setattr(f"kfqn_ext.optim.{module}.flush_", lambda x: x)
    with pytest.raises(AssertionError, match="momentum"):
        test_a_unit_that_dies_leaves_no_subnormal_numbers("KBFGS")
