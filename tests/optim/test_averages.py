"""A moving average takes the matrices of a minibatch that are finite, and leaves those that are not."""

import math

import pytest
import torch
from torch import Tensor

from kfqn_ext.optim.inverses import averages
from kfqn_ext.optim.inverses.base import Seen

ENTRIES = {"finite": (), "nan": (math.nan,), "inf": (math.inf,), "inf of both signs": (math.inf, -math.inf)}


def matrices(blocks: int) -> Tensor:
    return torch.randn(blocks, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(params=[True, False], ids=["on the host", "on a device"])
def on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "is_on_host", lambda t: request.param)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("entries", ENTRIES.values(), ids=list(ENTRIES))
def test_one_matrix_of_several(entries: tuple[float, ...], finite: bool) -> None:
    value, average = matrices(3), torch.ones(3, 5, 5, dtype=torch.float64)
    value[1].view(-1)[[4, 17][: len(entries)]] = torch.tensor(entries, dtype=torch.float64)
    before = value.clone()
    averages.move_towards(average, value, 0.9, Seen([], [], torch.tensor(finite), 1))
    for i in range(3):
        moves = finite and bool(value[i].isfinite().all())
        want = 0.9 + 0.1 * value[i] if moves else torch.ones(5, 5, dtype=torch.float64)
        assert torch.allclose(average[i], want, rtol=1e-14)
    assert torch.equal(value.nan_to_num(7.0), before.nan_to_num(7.0))
