"""The page on several processes shows the logs, these say what formulas and plan say, and the model adds up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost_model
from kfqn_ext.optim.preconditioner.owners import assigned
from tests.distributed.cases import STEPS, TOLERANCE

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "processes.md").read_text()
LOGS = [json.loads(line) for line in (REPOSITORY / "results" / "processes.jsonl").read_text().splitlines()]
FOUND = {log["problem"]: log["found"] for log in LOGS}


def test_the_page_shows_the_logs() -> None:
    shown = PAGE.split("<!-- processes -->")[1].split("<!-- end of processes -->")[0]
    assert shown.strip() == cost_model.render(LOGS).strip()


def test_the_page_says_how_near_one_process_is() -> None:
    assert STEPS == 10 and TOLERANCE == 1e-10
    assert "Ten steps in float64 agree to 10⁻¹⁰" in " ".join(PAGE.split())


@pytest.mark.parametrize("problem", FOUND)
def test_an_update_sends_vectors_or_factors(problem: str) -> None:
    """Beside the numbers of the formula, two counts for each quantity of a layer, and what ranks agree on."""
    alone = FOUND[problem]["1"]
    for ranks in FOUND[problem].keys() - {"1"}:
        members = FOUND[problem][ranks]["members"]
        ours = members["K-BFGS"]["due"]
        assert ours["messages"] == 3 and members["K-BFGS"]["ordinary"]["bytes"] == 0
        assert alone["vectors"] <= ours["bytes"] <= 1.02 * alone["vectors"]
        if "KFAC" in members:
            assert alone["factors"] <= members["KFAC"]["due"]["bytes"] <= 1.001 * alone["factors"]


@pytest.mark.parametrize("problem", FOUND)
def test_state_is_where_the_plan_has_it(problem: str) -> None:
    """A rank keeps a number more for each layer that another one owns."""
    alone = FOUND[problem]["1"]
    assert alone["kept"] == [sum(alone["states"])]
    for ranks in FOUND[problem].keys() - {"1"}:
        kept = FOUND[problem][ranks]["kept"]
        owners = assigned(alone["states"], [0] * int(ranks))
        planned = [sum(s for s, o in zip(alone["states"], owners, strict=True) if o == r) for r in range(int(ranks))]
        marks = [4 * (len(owners) - owners.count(rank)) for rank in range(int(ranks))]
        assert kept == [own + more for own, more in zip(planned, marks, strict=True)]


def test_vgg16_gains_nothing_beyond_six_ranks() -> None:
    states = FOUND["vgg16"]["1"]["states"]
    shares = {ranks: cost_model.fullest(states, assigned(states, [0] * ranks)) for ranks in (5, 6, 7, 100)}
    assert shares[5] > shares[6] == shares[7] == shares[100] == max(states) / sum(states)


def step(work: float, number: int = 0, messages: int = 0) -> dict[str, Any]:
    """One whose wall-clock time is twice its work, beside passes that take a second's work."""
    return {"work": work, "seconds": 2 * work, "bytes": number, "messages": messages, "passes_work": 1.0}


def test_the_model_adds_up() -> None:
    """By hand: a gradient in one message of 1000 bytes, a second a message and a millisecond a byte."""
    alone = {"gradient": 1000, "factors": 500, "states": [3, 1, 1], "inversions": [6, 2, 2]}
    kfac = {"ordinary": step(1), "due": step(2), "inverse": step(12)}
    of_two = {"ordinary": step(0), "due": step(0, 600, 2), "inverse": step(0, 850, 4)}
    found = {"1": {**alone, "members": {"KFAC": kfac}}, "2": {"members": {"KFAC": of_two}}}
    seconds = {
        "ordinary": 2 * 1 + 1 + 1.0,
        "due": 3 * 2 + 3 + 1.6,
        "inverse": 4 * (2 + 0.6 * 10) + 5 + 1.0 + 0.6 + 0.5,  # the first layer's owner has 6 of 10 inversions
    }
    expected = 0.9 * seconds["ordinary"] + 0.09 * seconds["due"] + 0.01 * seconds["inverse"]
    wire, slower = {"message": 1.0, "byte": 1e-3}, {"ordinary": 2.0, "due": 3.0, "inverse": 4.0}
    assert cost_model.predicted(found, "KFAC", 4, wire, slower) == pytest.approx(expected)
    assert cost_model.measured(found, "KFAC", 1) == pytest.approx(2 * (0.9 * 1 + 0.09 * 2 + 0.01 * 12))


def test_how_much_processes_slow_each_other_down() -> None:
    """Passes without messages, beside a kind of step, over the work that they are."""
    kinds = {"ordinary": step(1)}
    found = {ranks: {"members": {"SGD-m": kinds}} for ranks in ("1", "4")}
    found["4"] = {"members": {"SGD-m": {"ordinary": step(1) | {"passes_seconds": 3.0}}}}
    assert cost_model.slowed(found, "SGD-m", 4) == {"ordinary": 3.0}


def test_messages_among_many_ranks() -> None:
    two = {"message": 3.0, "byte": 5.0}
    assert cost_model.of_many(two, 2) == two
    assert cost_model.of_many(two, 16) == {"message": 12.0, "byte": 5.0 * 2 * 15 / 16}
    assert [cost_model.buckets(size << 20) for size in (1, 2, 26, 27)] == [1, 2, 2, 3]


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    """And keeps what there is of other problems."""
    file = tmp_path / "processes.jsonl"
    for problem in ("autoencoder", "vgg16"):
        command = [sys.executable, "-m", "benchmarks.processes", "--quick", "--steps", "1", "--ranks", "2"]
        command += ["--problem", problem, "--members", "SGD-m", "K-BFGS", "--json", str(file)]
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
        assert run.returncode == 0 and "K-BFGS, kB" in run.stdout, run.stderr
    assert [json.loads(line)["problem"] for line in file.read_text().splitlines()] == ["autoencoder", "vgg16"]
