"""What the peak of a step's memory is made of."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import memory_parts, options
from benchmarks.memory_parts import Live
from kfqn_ext.extensions import InputGram, KFACFactors
from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY, Member, rows


def test_the_peak_is_of_what_lives_at_once() -> None:
    known = torch.zeros(1000)
    with Live([known]) as live:
        a = torch.zeros(100)
        torch.ones(50)  # dies at once
        b = [a[1:], known.add_(1.0), torch.zeros(30)]
        assert live.peak == 4 * (100 + 50)
        live.begin()
        del a, b
        torch.ones(10)
        assert live.peak == 4 * (100 + 30)
        live.begin()
        c = torch.ones(20)
        assert live.peak == 4 * 20 and list(live.at_peak) == [live.number(c.untyped_storage())]


def test_the_parts_of_a_small_network(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--quick", "--problem", "vgg16", "--contenders", "kbfgs", "kfac"]
    memory_parts.main([*arguments, "--json", str(tmp_path / "log.json")])
    shown = capsys.readouterr().out.strip()
    log = json.loads((tmp_path / "log.json").read_text())
    assert options.text(log, memory_parts.render) == shown
    sgdm, kbfgs, kfac = log["bytes"]["vgg16"].values()
    weights = sgdm["held"]["state"]
    assert sgdm["later"]["state"] == weights >= sgdm["later"]["gradients"]
    assert sgdm["later"]["measured"] == sgdm["later"]["step and learning"] == 0
    assert 2 * weights < 0.99 * kbfgs["held"]["state"] < kbfgs["later"]["state"] <= kbfgs["held"]["state"]
    assert kfac["held"]["state"] > kbfgs["held"]["state"] and kfac["later"]["measured"] > 0


def keeps_no_factor(member: Member) -> bool:
    """Whether a step that is due measures no A, Ω or Γ: those of all layers come from one pass."""
    return not {InputGram, KFACFactors} & (member.recipe.first | member.recipe.second)


@pytest.mark.parametrize("name", rows(keeps_no_factor))
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_step_takes_state_gradients_directions_and_a_few_layers(name: str, dtype: torch.dtype | None) -> None:
    """In the first step too, where the A of each layer becomes its H_A: twelve layers have one."""
    torch.manual_seed(0)
    width, layers = 400, 12  # wide enough that the few vectors of each layer are small beside a matrix
    body = [m for _ in range(layers) for m in (nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width), nn.Tanh())]
    model = nn.Sequential(*body, nn.Linear(width, 3))
    with Live(model.parameters()) as live:
        optimizer = FAMILY[name].make(model, lr=0.01, damping=1.0, direction_dtype=dtype)
        batch = Minibatch(model, F.cross_entropy, torch.randn(4, width), torch.arange(4) % 3)
        for _ in range(3):
            live.begin()
            optimizer.step(batch)
            peak = live.peak
            live.begin()  # what is left are state, copies of it, and gradients
            directions = sum(4 * p.numel() for p in model.parameters())
            assert peak - live.peak < directions + 3 * 4 * (width + 1) ** 2
