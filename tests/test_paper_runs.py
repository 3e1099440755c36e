"""Runs on disk: logs, budgets, divergence, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.paper.cell import Cell
from examples.paper.defaults import make_cell, paper_cell
from examples.paper.run import checkpoint_path, run
from examples.paper.training import Training
from workloads import records
from workloads.data import Data
from workloads.problems import PROBLEMS
from workloads.records import Refused

CPU = torch.device("cpu")
MEASURED = ("epoch", "iteration", "lr", "minibatch_loss", "train_loss")


class Killed(Exception):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def digits() -> Data:
    return PROBLEMS["digits"].load(Path(), False)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(cell: Cell, data: Data, log: Path, resume: bool = False, watch=lambda status: None, **options) -> list[dict]:
    return run(cell, data, log, device=CPU, resume=resume, watch=watch, **options)


def measured(lines: list[dict]) -> list[tuple]:
    return [tuple(line[name] for name in MEASURED) for line in lines if line["kind"] == "epoch"]


def test_a_log_has_a_header_a_line_an_epoch_and_an_end(tmp_path: Path, digits: Data) -> None:
    log = tmp_path / "log.jsonl"
    lines = train(paper_cell("digits", "sgdm", epochs=3, seconds=60.0), digits, log)
    assert lines == records.read(log)
    assert [line["kind"] for line in lines] == ["header", *["epoch"] * 4, "end"]
    assert lines[0]["environment"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert [line["epoch"] for line in lines[1:-1]] == [0, 1, 2, 3]
    assert lines[-1]["outcome"] == "finished" and lines[-1]["iteration"] == 24
    assert lines[-2]["train_loss"] < lines[1]["train_loss"]
    assert not checkpoint_path(log).exists()


@pytest.mark.parametrize(
    ("budget", "steps"),
    [({"epochs": 2}, 16), ({"steps": 3}, 3), ({"epochs": 1, "steps": 20}, 8), ({"seconds": 1e-9}, 1)],
)
def test_the_first_budget_that_is_used_up_ends_a_run(budget: dict, steps: int, tmp_path: Path, digits: Data) -> None:
    lines = train(paper_cell("digits", "sgdm", **budget), digits, tmp_path / "log.jsonl")
    assert lines[-1]["iteration"] == steps
    assert lines[-2]["epoch"] == steps / 8  # a fraction where it ends within an epoch


@pytest.mark.parametrize("budget", [{"epochs": 2}, {"epochs": 9, "steps": 13}])
def test_steps_between_two_looks_at_the_clock_change_nothing(
    budget: dict, tmp_path: Path, digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which 20 steps keep busy."""
    cell = paper_cell("digits", "kbfgs", **budget)
    one = train(cell, digits, tmp_path / "one.jsonl")
    original = Training.__init__

    def looking_rarely(self: Training, *args: Any) -> None:
        original(self, *args)
        self._at_a_time = 3

    monkeypatch.setattr(Training, "__init__", looking_rarely)
    three = train(cell, digits, tmp_path / "three.jsonl")
    assert measured(one) == measured(three)
    assert one[-1]["iteration"] == three[-1]["iteration"]


def test_a_run_that_diverges_says_so(tmp_path: Path, digits: Data) -> None:
    lines = train(make_cell("digits", "sgdm", {"lr": 1e6, "epochs": 5}), digits, tmp_path / "log.jsonl")
    assert lines[-1]["outcome"] == "diverged" and "at iteration" in lines[-1]["reason"]


def test_evaluation_can_be_rarer_and_comes_at_the_end(tmp_path: Path, digits: Data) -> None:
    cell = paper_cell("digits", "sgdm", epochs=5, evaluate_every=2)
    lines = train(cell, digits, tmp_path / "log.jsonl")
    assert [line["epoch"] for line in lines if "train_loss" in line] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "method", ["adam", "kbfgs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgdm", "kbfgsl", "kfac"))]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(method: str, tmp_path: Path, digits: Data) -> None:
    changes = {"lr": 0.003, "damping": 0.3, "update_freq": "geometric", "epochs": 6}
    cell = make_cell("digits", method, changes)
    whole = train(cell, digits, tmp_path / "whole.jsonl")

    def kill_at(step: int):
        def watch(status) -> None:
            if status.step == step:
                raise Killed

        return watch

    log = tmp_path / "killed.jsonl"
    for step in (5, 21, 38):
        with pytest.raises(Killed):
            train(cell, digits, log, resume=True, watch=kill_at(step), checkpoint_every=0.0)
    resumed = train(cell, digits, log, resume=True)
    assert measured(resumed) == measured(whole)
    assert measured(records.read(log)) == measured(whole)
    assert len(resumed[0]["resumed"]) == 2  # the first was killed before its first checkpoint


def test_a_finished_run_can_be_made_longer_where_its_checkpoint_was_kept(tmp_path: Path, digits: Data) -> None:
    log = tmp_path / "log.jsonl"
    train(paper_cell("digits", "adam", epochs=2), digits, log, keep_checkpoint=True)
    longer = train(paper_cell("digits", "adam", epochs=4), digits, log, resume=True)
    whole = train(paper_cell("digits", "adam", epochs=4), digits, tmp_path / "whole.jsonl")
    assert measured(longer) == measured(whole)
    assert longer[0]["key"] == whole[0]["key"] and [line["kind"] for line in longer].count("end") == 1


@pytest.mark.parametrize("method", ["sgdm", "kbfgs", "kfac"])
@pytest.mark.parametrize("budgets", [[{"steps": 3}], [{"steps": 8}], [{"seconds": 1e-9}, {"steps": 4}, {"steps": 13}]])
def test_a_run_whose_budget_ended_within_an_epoch_goes_on_as_the_longer_run(
    method: str, budgets: list[dict], tmp_path: Path, digits: Data
) -> None:
    log = tmp_path / "log.jsonl"
    for budget in budgets:
        train(paper_cell("digits", method, **budget), digits, log, resume=True, keep_checkpoint=True)
    longer = train(paper_cell("digits", method, epochs=2), digits, log, resume=True)
    whole = train(paper_cell("digits", method, epochs=2), digits, tmp_path / "whole.jsonl")
    assert measured(longer) == measured(whole) and longer[-1]["iteration"] == 16
    assert records.read(log) == longer


def test_a_run_that_is_resumed_with_the_budget_it_has_used_up_stays_as_it_is(tmp_path: Path, digits: Data) -> None:
    log, cell = tmp_path / "log.jsonl", paper_cell("digits", "sgdm", steps=3)
    first = train(cell, digits, log, keep_checkpoint=True)
    assert measured(train(cell, digits, log, resume=True)) == measured(first)


@pytest.mark.parametrize("budget", [{"epochs": 1}, {"steps": 9}, {"seconds": 1e-9}])
def test_a_run_can_not_become_shorter(budget: dict, tmp_path: Path, digits: Data) -> None:
    log = tmp_path / "log.jsonl"
    train(paper_cell("digits", "sgdm", epochs=2), digits, log, keep_checkpoint=True)
    before = log.read_bytes()
    with pytest.raises(Refused, match="budget of this run is used up"):
        train(paper_cell("digits", "sgdm", **budget), digits, log, resume=True)
    assert log.read_bytes() == before


def test_a_checkpoint_of_another_cell_is_refused(tmp_path: Path, digits: Data) -> None:
    log = tmp_path / "log.jsonl"
    train(paper_cell("digits", "adam", epochs=1), digits, log, keep_checkpoint=True)
    before = log.read_bytes()
    with pytest.raises(Refused, match=r"another cell \(seed 0, not 1\)"):
        train(paper_cell("digits", "adam", epochs=1, seed=1), digits, log, resume=True)
    assert log.read_bytes() == before


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_finished_run_without_a_checkpoint_is_not_deleted_to_resume_it(
    epochs: int, tmp_path: Path, digits: Data
) -> None:
    log = tmp_path / "log.jsonl"
    train(paper_cell("digits", "adam", epochs=1), digits, log)
    before = log.read_bytes()
    with pytest.raises(Refused, match="--keep-checkpoint"):
        train(paper_cell("digits", "adam", epochs=epochs), digits, log, resume=True)
    assert log.read_bytes() == before


def test_what_diverged_leaves_no_checkpoint_to_go_on_from(tmp_path: Path, digits: Data) -> None:
    cell = make_cell("digits", "sgdm", {"lr": 1e6, "epochs": 5})
    train(cell, digits, tmp_path / "log.jsonl", keep_checkpoint=True)
    assert not checkpoint_path(tmp_path / "log.jsonl").exists()


def test_two_logs_have_two_checkpoints() -> None:
    names = ["runs/lr0.03", "runs/lr0.01", "runs/lr0", "runs/lr0.jsonl", "runs/lr0.03.jsonl"]
    assert len({checkpoint_path(Path(name)) for name in names}) == len(names)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_on_the_same_log_is_refused_and_the_first_goes_on(
    resume: bool, tmp_path: Path, digits: Data
) -> None:
    log, refused = tmp_path / "log.jsonl", []

    def watch(status) -> None:
        if status.step in (4, 12):
            with pytest.raises(Refused, match="Another run is writing"):
                train(paper_cell("digits", "adam", epochs=1), digits, log, resume=resume)
            refused.append(status.step)

    cell = paper_cell("digits", "sgdm", epochs=2)
    lines = train(cell, digits, log, watch=watch)
    assert refused == [4, 12]
    assert records.read(log) == lines and len(lines) == 5
    train(cell, digits, log)  # nothing is left locked


def write_log(path: Path, lines: str) -> None:
    """A log from h, e and digits: header, end, and epochs at iterations."""
    kinds = {"h": {"kind": "header"}, "e": {"kind": "end"}}
    records.replace(path, [kinds.get(line) or {"kind": "epoch", "iteration": int(line)} for line in lines])


@pytest.mark.parametrize(
    "lines", ["hh01e", "h0h1e", "0h1e", "h01e2", "h01ee", "h010e", "h011", "h021e", "h0e1e", "eh0"]
)
def test_a_log_of_two_runs_is_refused(lines: str, tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", lines)
    with pytest.raises(Refused, match="lines of several runs"):
        records.read(tmp_path / "log.jsonl")


@pytest.mark.parametrize("lines", ["h", "h0", "h05", "h058e", "he"])
def test_a_log_of_one_run_is_read(lines: str, tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", lines)
    assert len(records.read(tmp_path / "log.jsonl")) == len(lines)


def test_json_that_is_no_log_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('3\n{"a": 1}\n')
    assert records.read(tmp_path / "other.jsonl") == [3, {"a": 1}]


def test_a_line_that_was_cut_short_is_no_line_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.append(path, {"a": 1})
    with path.open("a") as file:
        file.write(json.dumps({"b": 2})[:-2])
    assert records.read(path) == [{"a": 1}]
    records.append(path, {"c": 3})
    assert records.read(path) == [{"a": 1}, {"c": 3}]
