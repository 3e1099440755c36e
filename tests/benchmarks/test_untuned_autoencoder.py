"""The study of the paper's autoencoder beside the benchmark without tuning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.untuned import autoencoder, autoencoder_report, study, training
from benchmarks.untuned.autoencoder import CHOSEN, one, small_problem
from benchmarks.untuned.autoencoder_report import after, render, until
from benchmarks.untuned.data import Source
from benchmarks.untuned.log import Trial

QUICK = Source(quick=True)
CURVE = [(0, 0.0, 540.0), (1, 20.0, 60.0), (2, 40.0, 55.0), (3, 60.0, None)]


def run(directory: Path, *more: str) -> tuple[dict, list[dict]]:
    """The results of a quick run, and the lines of its log."""
    names = {"--log": "log", "--json": "json", "--figure": "figure.png"}
    files = [f"{option}={directory / name}" for option, name in names.items()]
    autoencoder.main(["--quick", "--jobs", "1", *files, *more])
    lines = (directory / "log").read_text().splitlines()
    return json.loads((directory / "json").read_text().splitlines()[-1]), [json.loads(line) for line in lines]


def test_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results, lines = run(tmp_path, "--seeds", "0", "1")
    assert render([results]) in capsys.readouterr().out
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(results["cells"]) == len(lines) == 2 * len(CHOSEN)
    for cell in results["cells"]:
        assert cell["error"] is None and [epoch for epoch, _, _ in cell["curve"]] == [0, 1, 2]
        _, seconds, losses = zip(*cell["curve"], strict=True)
        assert sorted(seconds) == list(seconds) and losses[2] < losses[1] < losses[0]
    assert len({(cell["seed"], cell["curve"][0][2]) for cell in results["cells"]}) == 2  # the same parameters


def test_only_what_is_missing_runs_again(tmp_path: Path) -> None:
    _, before = run(tmp_path)
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in before[1:]))
    _, lines = run(tmp_path)
    assert lines[:-1] == before[1:] and lines[-1]["optimizer"] == before[0]["optimizer"]


@pytest.mark.parametrize("name", CHOSEN)
def test_the_papers_rate_is_constant_and_others_fall_to_zero(name: str) -> None:
    problem, entry = small_problem("digits"), CHOSEN[name]
    optimizers = entry.build(problem.build(), **entry.grid[0])
    trial = Trial("digits", name, entry.grid[0], 8, 0)
    _, rate = autoencoder._start(trial, problem, problem.data(QUICK), optimizers)
    assert [rate(0), rate(4), rate(8)] == pytest.approx([1, 1, 1] if name == "kbfgs-paper" else [1, 0.5, 0])
    assert bool(optimizers[0].state) == (name == "kbfgs-paper")  # it starts from the curvature of all data


def test_the_papers_values() -> None:
    entry = CHOSEN["kbfgs-paper"]
    (optimizer,) = entry.build(small_problem("digits").build(), **entry.grid[0])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["damping"], group["curvature_update_freq"]) == (0.03, 0.3, 1)


def test_an_epoch_is_all_of_its_minibatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, events = small_problem("digits"), []

    def descend(*arguments: object) -> Iterator[tuple[float, float]]:
        for step in training.descend(*arguments):
            events.append("step")
            yield step

    monkeypatch.setattr(autoencoder, "descend", descend)
    monkeypatch.setattr(autoencoder, "mean_loss", lambda *_: events.append("loss") or 1.0)
    assert len(problem.data(QUICK).train) == autoencoder._IMAGES["digits"]
    assert (small_problem("mnist").batch_size, autoencoder._IMAGES["mnist"]) == (1000, 60_000)
    _, (line,) = run(tmp_path, "--optimizers", "onepass")
    epoch = 1797 // problem.batch_size
    assert events == ["loss", *2 * [*epoch * ["step"], "loss"]] and line["steps"] == 2 * epoch


def test_training_ends_where_the_loss_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "mean_loss", lambda *_: next(losses))
    losses = iter([5.0, float("nan")])
    found = one(Trial("digits", "kbfgs", {}, 4 * 8, 0), QUICK)
    assert [loss for _, _, loss in found["curve"]] == [5.0, None] and found["error"] is None


def test_what_breaks_off_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise ArithmeticError("no")

    monkeypatch.setattr(autoencoder, "mean_loss", fail)
    found = one(Trial("digits", "kbfgs", {}, 8, 0), QUICK)
    assert found["error"] == "ArithmeticError: no" and found["curve"] == [] and found["seconds"] == 0


def test_losses_after_epochs_and_epochs_until_losses() -> None:
    assert [after(CURVE, epoch) for epoch in (0, 2, 3, 9)] == ["540.00", "55.00", "∞", "∞"]
    assert [until(CURVE, target) for target in (60, 56, 54)] == ["1 (20 s)", "2 (40 s)", "–"]
    assert until([(0, None, 540.0), (1, None, 60.0)], 60) == "1"


def test_each_number_of_epochs_is_a_line_of_the_file(tmp_path: Path) -> None:
    def line(epochs: int, **curves: list) -> dict:
        cells = [{"problem": "p", "optimizer": a, "curve": curve, "error": None} for a, curve in curves.items()]
        cost = {"runs": 1, "seconds": 60.0, "wall": 60.0}
        titles = {name: name.title() for name in curves}
        return {"epochs": epochs, "optimizers": titles, "cells": cells, "cost": cost, "command": f"c {epochs}"}

    path = tmp_path / "lines.jsonl"
    study.write_beside(path, line(3, a=CURVE), "epochs")
    study.write_beside(path, line(1, a=[(0, None, 540.0), (1, None, 99.0)]), "epochs")
    lines = study.write_beside(path, line(1, a=[(0, None, 540.0), (1, None, 54.0)]), "epochs")
    assert [each["epochs"] for each in lines] == [1, 3]
    assert [json.loads(text)["epochs"] for text in path.read_text().splitlines()] == [1, 3]
    text = render(lines)
    assert "| A, 1 epochs | 54.00 |  |  |" in text and "| A, 3 epochs | 60.00 | 55.00 | ∞ |" in text
    assert "| A, 1 epochs | 1 | 1 | 1 | – |" in text and "| A, 3 epochs | 1 (20 s) | 2 (40 s) | – | – |" in text
    assert "`c 1`" in text and "`c 3`" in text


def test_seconds_can_be_left_out(tmp_path: Path) -> None:
    results, _ = run(tmp_path, "--optimizers", "onepass", "--without-seconds")
    assert [seconds for _, seconds, _ in results["cells"][0]["curve"]] == 3 * [None]


def test_the_figure_has_the_longest_run_of_each_optimizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In seven rows of a log the eye can't follow seven lines."""

    def results(epochs: int, *names: str) -> dict[str, Any]:
        cells = [{"optimizer": name, "curve": [[0, None, 9.0], [1, None, 8.0], [epochs, None, 7.0]]} for name in names]
        return {"epochs": epochs, "optimizers": {name: name.upper() for name in names}, "cells": cells}

    drawn: list[str] = []
    monkeypatch.setattr(
        autoencoder_report, "save", lambda figure, path: drawn.extend(t.get_text() for t in figure.legends[0].texts)
    )
    autoencoder_report.draw([results(16, "a", "b", "c"), results(40, "b"), results(100, "a")], tmp_path / "figure.png")
    assert drawn == ["C, 16 epochs", "B, 40 epochs", "A, 100 epochs"]
