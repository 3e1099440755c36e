"""No slower than recorded: ``python -m benchmarks.record`` writes the ratios that are read here."""

import json

import pytest
import torch

from benchmarks.problems import PROBLEMS
from benchmarks.record import RECORDED, ratios, regressions
from benchmarks.turns import prepare
from workloads.environment import describe

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_ratio_is_far_above_the_recorded_one(problem: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    device = prepare("cpu")
    here, there = describe(device), recorded["environment"]
    for key in ("processor", "device"):
        if here[key] != there[key]:
            pytest.skip(f"recorded with {key} {there[key]}: its ratios say nothing about {here[key]}")
    before = {name: value for name, value in recorded["ratios"].items() if name.startswith(f"{problem}: ")}
    assert before
    assert regressions(ratios([problem], 7, False, device), before) == []


def test_the_check_can_fail() -> None:
    recorded = {"p: a step": 1.0, "p: another": 2.0}
    assert regressions({"p: a step": 1.14, "p: another": 2.28}, recorded) == []
    assert regressions({"p: a step": 1.16, "p: another": 2.0}, recorded) == ["p: a step: 1.16, recorded 1.00"]
    assert regressions({"p: a step": 1.0}, recorded) == [
        "p: another: 2.00 was recorded, and it is not measured any more"
    ]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_recorded_is_what_is_measured(problem: str) -> None:
    recorded = [name for name in json.loads(RECORDED.read_text())["ratios"] if name.startswith(f"{problem}: ")]
    assert sorted(ratios([problem], 1, True, CPU)) == sorted(recorded)
