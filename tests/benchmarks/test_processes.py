"""The page on several processes shows the log, and the log what the formula says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import render

REPOSITORY = Path(__file__).parents[2]
LOG = json.loads((REPOSITORY / "results" / "processes.jsonl").read_text().splitlines()[0])


def test_the_page_shows_the_log() -> None:
    page = (REPOSITORY / "docs" / "processes.md").read_text()
    shown = page.split("<!-- processes -->")[1].split("<!-- end of processes -->")[0]
    assert shown.strip() == render(LOG).strip()


def test_an_update_sends_vectors() -> None:
    """Beside the numbers of the formula, two counts for each quantity of a layer, and what ranks agree on."""
    for problem in LOG["found"]["problems"].values():
        assert problem["messages"] == 3
        assert problem["formula"] <= problem["sent"] <= 1.02 * problem["formula"]
        assert problem["sent"] < 0.01 * problem["kfac"]


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.processes", "--quick", "--steps", "3"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0 and "K-BFGS, kB" in run.stdout, run.stderr
