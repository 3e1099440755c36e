"""Seconds to losses: which runs there are, what a run keeps, and what the table says of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import options as shared
from benchmarks.time_to_loss import command, race, report
from benchmarks.time_to_loss.grids import OPTIMIZERS, grid
from benchmarks.time_to_loss.problems import RACES
from benchmarks.time_to_loss.race import Heat
from benchmarks.time_to_loss.study import RaceStudy, key
from benchmarks.untuned.data import Source

STUDY = RaceStudy(["vgg"], ["onepass", "adam"], [0, 1, 2], quick=False)


def record(run: Heat, last: float, **more: Any) -> dict[str, Any]:
    curve = [(1.0 * i, last) for i in range(1, 20)] + [(run.seconds, last)]
    return {**vars(run), "curve": curve, "error": None, "wall": 1.0, **more}


def done(study: RaceStudy, losses: dict[float, float]) -> dict[str, Any]:
    """All runs, each of a setting with the loss that is given for its rate."""
    found: dict[str, Any] = {}
    for run in study.runs(found):
        found[key(run)] = record(run, losses[run.setting.get("lr", 0.0)])
    return found


def test_the_whole_grid_runs_and_then_the_best_with_other_seeds() -> None:
    losses = {0.0: 0.2, 3e-3: 0.3, 1e-2: 0.1, 3e-2: math.inf}
    found = done(STUDY, losses)
    runs = list(STUDY.runs(found))
    assert len(runs) == STUDY.number == len(found) == 3 + 5
    assert [run.setting["lr"] for run in runs if run.optimizer == "adam"] == [3e-3, 1e-2, 3e-2, 1e-2, 1e-2]
    assert [run.seed for run in runs if run.optimizer == "onepass"] == [0, 1, 2]
    row = STUDY.results(found)["problems"]["vgg"]["rows"]["Adam"]
    assert row["setting"] == {"lr": 1e-2} and not row["at an end"] and len(row["seeds"]) == 3


def test_a_run_that_broke_off_is_not_the_best() -> None:
    found = done(STUDY, {0.0: 0.2, 3e-3: 0.3, 1e-2: 0.1, 3e-2: 0.2})
    for name, each in found.items():
        if '"lr": 0.01' in name:
            found[name] = {**each, "error": "RuntimeError: no", "curve": each["curve"][:3]}
    assert STUDY.best("vgg", "adam", found) == {"lr": 3e-2}


@pytest.mark.parametrize("problem", RACES)
def test_grids_are_of_those_who_race(problem: str) -> None:
    for name, entry in OPTIMIZERS.items():
        assert len(grid(problem, name)) == (3 if entry.is_tuned else 1)
    assert list(RACES[problem].losses) == sorted(RACES[problem].losses, reverse=True)


def test_seconds_are_to_the_first_full_mean_that_is_low_enough() -> None:
    low = [(0.1 * i, 0.5) for i in range(1, 9)]  # fewer than ten minibatches: no mean of ten
    curve = [*low, (0.9, 3.0), (1.0, 2.0), (1.1, None), (1.2, 1.0), (1.3, 0.5)]
    assert [race.reached(curve, loss) for loss in (2.5, 1.0, 0.6, 0.1)] == [1.0, 1.2, 1.3, None]


def test_the_rate_falls_to_zero_over_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock by which each step takes a second."""
    ticks, rates = iter(range(10**6)), []
    plain = torch.optim.SGD.step

    def step(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return plain(self, *args)

    monkeypatch.setattr(race, "now", lambda device: float(next(ticks)))
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    run = Heat("resnet", "sgdm", {"lr": 0.1}, 0, 4.0, True)
    found = race.outcome(run, Source(quick=True))
    assert found["error"] is None and [seconds for seconds, _ in found["curve"]] == [1, 2, 3, 4]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(4)])


def test_what_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Heat("resnet", "sgdm", {"lr": -1.0}, 0, 1.0, True)
    assert "Invalid learning rate" in race.outcome(run, Source(quick=True))["error"]


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log, numbers = tmp_path / "log.jsonl", tmp_path / "numbers.json"
    options = ["--quick", "--problem", "resnet", "--log", str(log), "--json", str(numbers)]
    command.main([*options, "--optimizers", "sgdm", "--seeds", "0"])
    assert len(log.read_text().splitlines()) == 3
    command.main([*options, "--optimizers", "sgdm", "onepass", "--seeds", "0", "1"])
    assert len(log.read_text().splitlines()) == 3 + 1 + 2
    shown, results = capsys.readouterr().out, json.loads(numbers.read_text())
    assert shared.text(results, report.render) in shown
    (problem,) = results["problems"].values()
    assert {len(row["seeds"]) for row in problem["rows"].values()} == {2}
    for row in problem["rows"].values():
        assert all(seed["steps"] > 0 for seed in row["seeds"])


def test_the_table() -> None:
    seeds = [{"reached": [1.0, 5.0], "final": 0.1, "steps": 10}, {"reached": [2.0, None], "final": 0.2, "steps": 12}]
    seeds.append({"reached": [3.0, 7.0], "final": 0.3, "steps": 14})
    never = [{"reached": [None, None], "final": None, "steps": 3}] * 3
    why = "RuntimeError: no such | kernel"
    rows = {
        "never": {"setting": {"lr": 0.1}, "at an end": True, "seeds": never, "error": why},
        "often": {"setting": {}, "at an end": False, "seeds": seeds, "error": None},
    }
    problem = {"title": "p", "seconds": 8.0, "losses": [1.0, 0.5], "rows": rows}
    lines = report.render({"quick": False, "problems": {"p": problem}}).splitlines()
    assert lines[0] == "**p**, 8 s a run, 3 seed(s):"
    assert lines[-2:] == [
        "| often | 2.0 | 6.0 (2 of 3) | 0.2 | 12 | none |",
        "| never, which broke off: RuntimeError: no such / kernel | — | — | — | 3 | α 0.1* |",
    ]
