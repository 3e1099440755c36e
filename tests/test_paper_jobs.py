"""The job list: whatever is killed and when, nothing is lost and nothing runs twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.paper import records
from examples.paper.cli import main
from examples.paper.jobs import ROOT, pending
from examples.paper.results import RESULTS, finished_keys, load

MEASURED = ["epoch", "iteration", "lr", "minibatch_loss", "train_loss"]


def table(out: Path, *more: str) -> list[str]:
    return ["table", "digits", "--methods", "adam", "sgdm", "--seeds", "1", "--out", str(out), "--threads", "1", *more]


def test_a_table_runs_each_cell_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(table(tmp_path, "--epochs", "2"))
    lines = records.read(tmp_path / RESULTS)
    assert len(lines) == 2 and "2 results" in capsys.readouterr().out
    main(table(tmp_path, "--epochs", "2"))
    assert records.read(tmp_path / RESULTS) == lines
    assert [r.outcome for r in load([tmp_path])] == ["finished"] * 2
    assert not list(tmp_path.glob("cells/*.checkpoint"))


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


def test_missing_data_end_a_table_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--download"):
        main(["table", "table-1", "--out", str(tmp_path / "out"), "--data-root", str(tmp_path)])


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
