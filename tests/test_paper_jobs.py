"""The job list: whatever is killed and when, nothing is lost and nothing runs twice."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.paper.cli import main
from examples.paper.defaults import paper_cell
from examples.paper.jobs import ROOT, pending
from examples.paper.progress import Board, fraction_done
from examples.paper.results import load
from examples.paper.sources import RESULTS, finished_keys
from examples.paper.training import Status, Training
from examples.paper.worker import Job, work
from workloads import records

MEASURED = ["epoch", "iteration", "lr", "minibatch_loss", "train_loss"]


def table(out: Path, *more: str) -> list[str]:
    return ["table", "digits", "--methods", "adam", "sgdm", "--seeds", "1", "--out", str(out), "--threads", "1", *more]


@pytest.mark.slow
def test_a_table_runs_each_cell_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(table(tmp_path, "--epochs", "2"))
    lines = records.read(tmp_path / RESULTS)
    assert len(lines) == 2 and "2 results" in capsys.readouterr().out
    main(table(tmp_path, "--epochs", "2"))
    assert records.read(tmp_path / RESULTS) == lines
    assert [r.outcome for r in load([tmp_path])] == ["finished"] * 2
    assert not list(tmp_path.glob("cells/*.checkpoint"))


@pytest.mark.slow
def test_a_cell_that_failed_is_reported_and_runs_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, options = tmp_path / "out", ["--methods", "sgdm", "--epochs", "1"]
    monkeypatch.setenv("PYTHONPATH", str(_broken_torchvision(tmp_path / "broken")))
    with pytest.raises(SystemExit, match="broken on purpose"):
        main(table(out, *options))
    assert finished_keys(out) == set()
    monkeypatch.delenv("PYTHONPATH")
    main(table(out, *options))
    assert len(finished_keys(out)) == 1


def _broken_torchvision(directory: Path) -> Path:
    """A directory that makes workers fail when they import torchvision."""
    directory.mkdir()
    (directory / "torchvision.py").write_text("raise RuntimeError('broken on purpose')")
    return directory


def made_up_sklearn(directory: Path, load_digits: str) -> Path:
    """A directory in which workers find a sklearn that notes each of its imports, and loads digits of its own."""
    (directory / "sklearn").mkdir(parents=True)
    (directory / "sklearn/__init__.py").touch()
    (directory / "sklearn/datasets.py").write_text(f"""
import os, pathlib, types
import numpy as np
here = pathlib.Path(__file__).parent
with (here / "imports").open("a") as file:
    print("imported", file=file)
def load_digits():
    {load_digits}
    return types.SimpleNamespace(data=np.random.RandomState(0).rand(400, 64) * 16)
""")
    return directory


def test_imports_are_made_once_for_all_cells_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take several seconds, and a cell may take one."""
    made_up = made_up_sklearn(tmp_path / "made up", "pass")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made_up), os.environ.get("PYTHONPATH", "")]))
    main(table(tmp_path / "out", "--epochs", "1"))
    assert len(finished_keys(tmp_path / "out")) == 2
    assert (made_up / "sklearn/imports").read_text().count("imported") == 1


def test_each_cell_has_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashes takes no other along, and the next ones are worked on."""
    crash = "(here / 'crashed').exists() or (here / 'crashed').touch() or os.abort()"
    made_up = made_up_sklearn(tmp_path / "made up", crash)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made_up), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(table(out, "--epochs", "1"))
    assert re.fullmatch(r"digits-adam-seed0-\w+ failed: exit status -6", str(end.value.code))
    assert len(finished_keys(out)) == 1
    main(table(out, "--epochs", "1"))
    assert len(finished_keys(out)) == 2


def test_missing_data_end_a_table_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--download"):
        main(["table", "table-1", "--out", str(tmp_path / "out"), "--data-root", str(tmp_path)])


class Killed(BaseException):
    """Stands for SIGKILL."""


def _kill(*args, **options) -> None:
    raise Killed


@pytest.mark.parametrize("moment", ["before its checkpoint goes", "before its result is written", "after that"])
def test_a_worker_that_is_killed_after_the_run_does_not_lose_it(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    cell = paper_cell("digits", "sgdm", epochs=2)
    job = Job(vars(cell), str(tmp_path), "data", "cpu", 1, 0.0, "made up", 1)
    append = records.append

    def append_and_die(path: Path, record: dict) -> None:
        if moment == "after that" or path.name != RESULTS:
            append(path, record)
        if path.name == RESULTS:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment == "before its checkpoint goes":
            patch.setattr(Path, "unlink", _kill)
        patch.setattr(records, "append", append_and_die)
        work(job)
    assert records.ended(records.read(job.log()))
    monkeypatch.setattr(Training, "train_epoch", _kill)
    work(job)
    (result,) = load([tmp_path])
    assert result.cell == cell and result.end["iteration"] == 16
    assert len(records.read(tmp_path / RESULTS)) == 1 and not list(tmp_path.glob("cells/*.checkpoint"))


@pytest.mark.parametrize("error", ["KeyError: a[0]", "[/red] no [bold]tag[/bold]", "list[int] :x:", "\\"])
def test_the_display_shows_an_error_as_it_is(error: str, capsys: pytest.CaptureFixture) -> None:
    cell = paper_cell("digits", "sgdm", epochs=2)
    with Board(1, 0) as board:
        board.started(cell)
        board.ended(cell, error)
    assert f"{cell.key}: failed: {error}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"epochs": 2, "seconds": 1000.0}, 0.75),
        ({"epochs": 2, "seconds": 2.5}, 0.8),
        ({"epochs": 2, "seconds": 1.0}, 1.0),
        ({"steps": 24, "epochs": 9}, 0.5),
        ({"epochs": 0}, 1.0),
    ],
)
def test_a_bar_shows_the_budget_that_ends_the_run(budget: dict, expected: float) -> None:
    status = Status("train", epoch=1, step=12, steps_per_epoch=8, loss=1.0, seconds=2.0)
    assert fraction_done(paper_cell("digits", "sgdm", **budget), status) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_five_random_moments_a_table_is_the_same(tmp_path: Path) -> None:
    options = ["--methods", "kbfgs", "adam", "sgdm", "--epochs", "150", "--jobs", "2", "--checkpoint-every", "0"]
    main(table(tmp_path / "whole", *options))
    moments = random.Random(0)
    for i in range(5):
        command = [sys.executable, "-m", "examples.paper", *table(tmp_path / "killed", *options)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
        _wait_for(lambda: list((tmp_path / "killed").glob("cells/*.checkpoint")), process)
        time.sleep(moments.uniform(0, 2))
        # The job list alone, whose workers then find nobody to report to; or all of them at once.
        (os.kill if i % 2 else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
    main(table(tmp_path / "killed", *options))
    whole, killed = (sorted(load([tmp_path / name]), key=lambda r: r.header["key"]) for name in ("whole", "killed"))
    assert len(records.read(tmp_path / "killed" / RESULTS)) == len(killed) == len(whole) == 3
    assert any(r.header.get("resumed") for r in killed)
    for a, b in zip(whole, killed, strict=True):
        assert a.cell == b.cell
        assert a.epochs[MEASURED].equals(b.epochs[MEASURED])
    assert pending([r.cell for r in whole], tmp_path / "killed") == []


def _wait_for(condition, process: subprocess.Popen) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.05)
