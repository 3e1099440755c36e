"""What docs/guide.md says is what its logs in results/ say."""

import json
import math
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.untuned import heatmaps
from benchmarks.untuned.lists import ENTRIES
from kfqn_ext import KBFGS, OnePassKBFGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guide.md").read_text()
WORDS = " ".join(PAGE.split())
RESULTS = json.loads((ROOT / "results/untuned-heatmaps.jsonl").read_text())
ROBUST = json.loads((ROOT / "results/untuned-robust.jsonl").read_text())


def test_the_table_is_that_of_the_log() -> None:
    _, begin, rest = PAGE.partition("<!-- untuned heatmaps -->")
    text, end, _ = rest.partition("<!-- end of untuned heatmaps -->")
    assert begin and end and text.strip() == heatmaps.render(RESULTS)


def test_the_default_is_a_cell_of_its_map() -> None:
    own = RESULTS["own"]
    assert own == {key: ENTRIES["onepass"].defaults()[key] for key in own}
    assert own["lr"] in heatmaps.RATES["onepass"] and own["damping"] in heatmaps.DAMPINGS["onepass"]


def test_the_figures_have_a_cell_for_each_run(tmp_path: Path) -> None:
    for name in heatmaps.RATES:
        heatmaps.draw(RESULTS, name, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").exists() and f"](guide/{name}.png)" in PAGE
        for problem in RESULTS["problems"]:
            cells = [c for c in RESULTS["cells"] if (c["optimizer"], c["problem"]) == (name, problem)]
            assert len(cells) == len(heatmaps.RATES[name]) * len(heatmaps.DAMPINGS[name])


def reached(key: str, **labels: object) -> str:
    """Of the runs with these labels, one a problem, or of the best of several: what the page's last words list."""
    cells = [c for c in RESULTS["cells"] if all(c[name] == value for name, value in labels.items())]
    best = [min(c[key] for c in cells if c["problem"] == problem) for problem in RESULTS["problems"]]
    *others, last = (f"{value:.2f}" for value in best)
    return f"{', '.join(others)} and {last}"


def test_what_is_reached_by_second() -> None:
    assert f"The default is there at {reached('at_seconds', optimizer='onepass', setting=RESULTS['own'])}" in WORDS
    assert f"is at {reached('loss', optimizer='adam', setting={})} as torch builds it" in WORDS
    assert f"At the best of five rates it is at {reached('loss', optimizer='adam')}." in WORDS


def upwards(value: float) -> str:
    """With one digit, of a bound."""
    return f"{math.ceil(10 * value) / 10:.1f}"


def test_what_is_seen_of_the_default_form() -> None:
    """Where its rate is the best; how much ε counts at that rate, and how near the default ε is."""
    rates, spans, gains, rate_gains = {}, {}, [], {}
    for problem in RESULTS["problems"]:
        cells = [c for c in RESULTS["cells"] if (c["optimizer"], c["problem"]) == ("onepass", problem)]
        best = min((c for c in cells if c["loss"] is not None), key=lambda c: c["loss"])
        own = {c["setting"]["damping"]: c["loss"] for c in cells if c["setting"]["lr"] == RESULTS["own"]["lr"]}
        rates[problem] = best["setting"]["lr"]
        rate_gains[problem] = min(own.values()) / best["loss"]
        spans[problem] = max(own.values()) / min(own.values())
        gains.append(own[RESULTS["own"]["damping"]] / best["loss"])
    assert [problem for problem, rate in rates.items() if rate != RESULTS["own"]["lr"]] == ["regression"]
    assert "is lowest at its own rate on three of the networks" in WORDS
    assert f"On the regression the own rate comes within {upwards(rate_gains['regression'])} times the lowest" in WORDS
    span = spans.pop("regression")
    assert f"within a factor of {upwards(max(spans.values()))} on three networks" in WORDS
    assert f"by {span:.0f} times from ε = 1 to 0.03" in WORDS
    assert f"is at most {upwards(max(gains))} times the lowest" in WORDS


def losses(**labels: object) -> list[float]:
    """Means over seeds of the one-pass row at its own rate, by problem and ε."""
    cells = [c for c in ROBUST["cells"] if c["optimizer"] == "onepass" and c["rate"] == 1.0]
    return [fmean(c["losses"]) for c in cells if all(c[key] == value for key, value in labels.items())]


def test_how_much_the_damping_matters() -> None:
    spans = [losses(problem=problem, late=False) for problem in ROBUST["problems"]]
    near = sum(max(span) / min(span) < 1.9 for span in spans)
    assert f"within a factor of 1.9 of the best on {near} of {len(spans)} small networks" in WORDS


def test_what_rare_updates_cost() -> None:
    costs = [
        losses(problem=problem, late=True)[0]
        / losses(problem=problem, late=False, damping=ROBUST["own"]["onepass"]["damping"])[0]
        for problem in ROBUST["problems"]
    ]
    *others, worst = sorted(costs)
    assert f"T = 20 from the first step costs at most {worst:.1f} times the loss" in WORDS
    assert len(others) == 6 and f"at most {upwards(others[-1])} times on six of seven" in WORDS


def test_how_often_the_default_updates() -> None:
    def due(make: Callable[..., Any], steps: int = 320) -> int:
        T = signature(make).parameters["curvature_update_freq"].default
        return sum(k % T(k) == 0 for k in range(1, steps + 1))

    default, printed = due(OnePassKBFGS), due(KBFGS.as_printed)
    assert f"which leaves {default} updates in 320 steps, and {printed} in the paper's form" in WORDS


@pytest.mark.parametrize(("value", "loss"), [(1.0, 1.0), (None, None)])
def test_a_run_that_failed_has_no_loss(value: float | None, loss: float | None) -> None:
    record = {"diverged": value is None, "error": None, "final": value, "seconds": 2.0, "curve": [[1, 1.0, value]]}
    trials = [heatmaps.Trial("lenet", "adam", {}, 2, 0), heatmaps.Trial("lenet", "onepass", {"lr": 1.0}, 2, 0)]
    made = heatmaps.cells(trials, {trial.key: record for trial in trials})
    assert [cell["loss"] for cell in made] == [cell["at_seconds"] for cell in made] == [loss, loss]


@pytest.mark.filterwarnings("ignore")  # a rate that is too large is worth a warning
def test_from_the_command_line_to_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--log", str(tmp_path / "log.jsonl"), "--json", str(tmp_path / "numbers.json")]
    heatmaps.main(["--quick", "--jobs", "1", "--problems", "deepmlp", *files, "--figures", str(tmp_path)])
    results = json.loads((tmp_path / "numbers.json").read_text())
    assert heatmaps.render(results) in capsys.readouterr().out
    assert len(results["cells"]) == sum(map(len, heatmaps.grids().values()))
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in heatmaps.RATES)
