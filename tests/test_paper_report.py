"""Reports: what is on the page follows from the logs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from examples.paper.cli import main
from examples.paper.defaults import make_cell, paper_cell
from examples.paper.figures import few
from examples.paper.page import provenance
from examples.paper.results import found, load
from examples.paper.sources import RESULTS, describe, to_line
from examples.paper.summary import chosen, main_table, mean_and_error, mean_curve, remarks, symbols, to_reach
from examples.paper.tables import TABLES, cells_of
from workloads import records
from workloads.lines import MOST, look
from workloads.methods import METHODS

ENVIRONMENT = {
    **{"processor": "abacus", "cores": 2, "device": "CPU", "threads": 1},
    **{"system": "any", "python": "3", "versions": {"torch": "2"}},
}


def lines(cell: Any, losses: list[float], outcome: str = "finished", column: str = "train_loss") -> list[dict]:
    """A log whose epochs take two seconds of a process that had a third of its core."""
    header = {"kind": "header", "key": cell.key, "cell": vars(cell), "command": "made up", "environment": ENVIRONMENT}

    def clock(epoch: int) -> dict[str, float]:
        return {
            "cpu_seconds": 2.0 * epoch,
            "seconds": 6.0 * epoch,
            "warm_start_seconds": 3.0,
            "evaluation_seconds": 4.0,
        }

    epochs = [
        {"kind": "epoch", "epoch": i, "iteration": i, "minibatch_loss": 1.0, column: loss, **clock(i)}
        for i, loss in enumerate(losses)
    ]
    end = {"kind": "end", "outcome": outcome, "reason": "loss nan at iteration 9", "iteration": 9}
    return [header, *epochs, end | clock(1)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """K-BFGS with two seeds, KFAC diverged at the paper's values and not at others, an accuracy."""
    runs = [
        lines(paper_cell("mnist", "kbfgs", seed=0, epochs=2), [500.0, 58.0, 52.0]),
        lines(paper_cell("mnist", "kbfgs", seed=1, epochs=2), [500.0, 60.0, 54.0]),
        lines(paper_cell("mnist", "kfac", epochs=2), [500.0], "diverged"),
        lines(paper_cell("mnist", "kfac", lr=0.1, damping=1.0, epochs=2), [500.0, 70.0, 61.0]),
        lines(paper_cell("vgg16-cifar10", "adam", epochs=1), [10.0, 90.0, 80.0], column="valid_accuracy"),
    ]
    for run in runs:
        records.append(tmp_path / RESULTS, to_line(run))
    describe(tmp_path, "table-1")
    return tmp_path


def test_error_is_std_over_root_seeds() -> None:
    values = [52.0, 53.0, 57.0]
    assert mean_and_error(values) == f"54.00 ± {np.std(values) / np.sqrt(3):.2f}"
    assert mean_and_error([52.0]) == "52.00"


def test_the_table_shows_means_beside_the_paper_s_numbers(directory: Path) -> None:
    results = load([directory])
    table = main_table(results, "mnist", {"mnist": {"kbfgs": 51.6}}).set_index("method")
    assert table.loc["K-BFGS", "training loss, last"] == "53.00 ± 0.71"
    assert table.loc["K-BFGS", "paper"] == "51.60"
    assert table.loc["KFAC", "hyperparameters"] == "α 0.1, λ 1, T₁ 1, T₂ 20"
    accuracy = main_table(results, "vgg16-cifar10", None).iloc[0]
    assert (accuracy["validation accuracy, %, last"], accuracy["best"]) == ("80.00", "90.00")


def test_what_is_not_as_in_the_paper_is_said(directory: Path) -> None:
    diverged, changed = remarks(load([directory]), "mnist")
    assert diverged == "KFAC (α 0.3, λ 10, T₁ 1, T₂ 20) diverged: seed 0: loss nan at iteration 9."
    assert changed == "KFAC does not run at the paper's values: α 0.1 for 0.3, λ 1 for 10."


def test_a_loss_that_is_finite_and_huge_counts_as_diverged(tmp_path: Path) -> None:
    cell = paper_cell("curves-generated", "kfac", epochs=2)
    records.append(tmp_path / RESULTS, to_line(lines(cell, [500.0, 140.0, 1.9e33])))
    (result,) = load([tmp_path])
    assert result.outcome == "diverged"
    assert remarks([result], "curves-generated") == [
        "KFAC (α 0.3, λ 10, T₁ 1, T₂ 20) diverged: seed 0: loss 1.9e+33 after epoch 2."
    ]
    assert found([result]) == {}


def test_a_search_finds_the_best_values_among_those_that_did_not_diverge(directory: Path) -> None:
    values = found(load([directory]))
    assert values["mnist", "kfac"]["lr"] == 0.1
    table = replace(TABLES["table-1"], problems=("mnist",), methods=("kbfgs", "kfac"))
    cells = cells_of(table, values="found", seeds=[7, 8], budget={"epochs": 1}, changes={}, found=values)
    assert {(c.method, c.seed) for c in cells} == {(m, s) for m in ("kbfgs", "kfac") for s in (7, 8)}
    assert {c.lr for c in cells if c.method == "kfac"} == {0.1}


@pytest.mark.parametrize(
    "budget", [{"epochs": 30}, {"steps": 9}, {"seconds": 5}, {"decay_every": 7}, {"batch_size": 10}, {"data_limit": 20}]
)
def test_runs_of_different_budgets_are_no_seeds_of_one_setting(tmp_path: Path, budget: dict[str, Any]) -> None:
    for seed, losses in ((0, [9.0, 5.0]), (1, [9.0, 6.0])):
        records.append(tmp_path / RESULTS, to_line(lines(paper_cell("digits", "sgdm", epochs=1, seed=seed), losses)))
    other = paper_cell("digits", "sgdm", **({"epochs": 1} | budget))
    records.append(tmp_path / RESULTS, to_line(lines(other, [9.0, 4.0])))
    results = load([tmp_path])
    assert [r.cell for r in chosen(results, "digits")["sgdm"]] == [other]
    (row,) = main_table(results, "digits", None).to_dict("records")
    assert (row["seeds"], row["best"]) == ("1", "4.00")
    (value,) = budget.values()
    assert str(value) in row["hyperparameters"].removeprefix("α 0.003")
    (remark,) = [text for text in remarks(results, "digits") if "several budgets" in text]
    assert str(value) in remark
    assert main_table(results[:2], "digits", None)["hyperparameters"].tolist() == ["α 0.003"]


def test_the_data_and_the_decay_that_are_not_the_paper_s_are_said(tmp_path: Path) -> None:
    cells = [
        make_cell("vgg16-cifar10", "sgdm", {"lr": 0.003, "weight_decay": 0.1, "epochs": 1, "decay_every": 0}),
        make_cell("mnist", "adam-2020", {"lr": 0.1, "damping": 0.1, "epochs": 1, "batch_size": 9, "data_limit": 50}),
    ]
    for cell, column in zip(cells, ("valid_accuracy", "train_loss"), strict=True):
        records.append(tmp_path / RESULTS, to_line(lines(cell, [2.0, 1.0], column=column)))
    results = load([tmp_path])
    (cnn,), (autoencoder,) = (remarks(results, problem) for problem in ("vgg16-cifar10", "mnist"))
    assert cnn == "SGD-m does not run at the paper's values: decay of α never for every 60 epochs."
    assert autoencoder.endswith("does not run at the paper's values: m 9 for 1000, training data 50 for all.")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_symbols_of_what_changes_it(method: str) -> None:
    has = symbols(method)
    assert has.keys() == set(METHODS[method].hyperparameters)
    assert has.get("damping") == (None if method == "sgdm" else "ε" if "adam" in method else "λ")
    assert has.get("update_freq") == (None if METHODS[method].first_order else "T₂" if "kfac" in method else "T")
    assert ("stats_update_freq" in has) == ("kfac" in method)


def test_lines_of_a_figure_are_told_apart_without_color() -> None:
    looks = [(look(number)["linestyle"], look(number)["marker"]) for number in range(MOST)]
    assert len(set(looks)) == MOST
    assert max(range(MOST), key=lambda number: look(number)["zorder"]) == 0


def test_what_is_drawn_where_not_all_can_be() -> None:
    """The usual ones, also where they end highest, and the lowest of the others."""
    usual = ("kbfgs", "kbfgsl", "kfac", "adam", "sgdm")
    ends = {method: 90.0 + i if method in usual else float(i) for i, method in enumerate(reversed(METHODS))}
    curves = {method: pd.DataFrame({"mean": [99.0, end]}) for method, end in ends.items()}
    lowest = min(ends, key=lambda method: ends[method])
    assert set(few(curves)) == {*usual, lowest} and len(curves) > MOST


def test_levels_are_reached_by_the_mean(directory: Path) -> None:
    reach = to_reach(load([directory]), "mnist", [60.0, 53.0, 50.0]).set_index("method")
    assert reach.loc["K-BFGS"].tolist() == ["1 (2 s)", "2 (4 s)", "–"]
    assert reach.loc["KFAC"].tolist() == ["–", "–", "–"]


@pytest.mark.parametrize(
    ("environment", "seconds"), [({}, 4.0), ({"threads": 2}, 12.0), ({"device": "NVIDIA H100"}, 12.0)]
)
def test_time_is_the_process_s_own_where_that_is_one_thread_of_a_cpu(
    tmp_path: Path, environment: dict[str, Any], seconds: float
) -> None:
    header, *rest = lines(paper_cell("mnist", "kbfgs", epochs=2), [500.0, 58.0, 52.0])
    records.append(tmp_path / RESULTS, to_line([header | {"environment": ENVIRONMENT | environment}, *rest]))
    (result,) = load([tmp_path])
    assert result.epochs["seconds"].iloc[-1] == seconds and result.end["seconds"] == seconds / 2


def test_a_run_that_was_continued_in_two_threads_tells_the_wall_clock_s_time(tmp_path: Path) -> None:
    run = lines(paper_cell("mnist", "adam", epochs=1), [500.0, 60.0])
    run[0]["resumed"] = [{"command": "", "started": "", "environment": ENVIRONMENT | {"threads": n}} for n in (1, 2)]
    records.append(tmp_path / RESULTS, to_line(run))
    (result,) = load([tmp_path])
    assert result.epochs["seconds"].tolist() == [0.0, 6.0]
    text = provenance([result])
    assert "threads: 1" in text and "threads: 2" in text and "the wall clock's" in text and "process" not in text


def test_curves_stop_where_a_seed_stops(tmp_path: Path) -> None:
    for seed in (0, 1):
        run = lines(paper_cell("mnist", "kbfgs", seed=seed, epochs=9), [5.0] * (3 + seed))
        records.append(tmp_path / RESULTS, to_line(run))
    assert len(mean_curve(load([tmp_path]))) == 3


def test_the_page_has_tables_figures_and_provenance(directory: Path, capsys: pytest.CaptureFixture) -> None:
    log = directory / "single.jsonl"
    records.replace(log, lines(paper_cell("curves-generated", "adam", epochs=1), [100.0, 90.0]))
    page = directory / "docs" / "results.md"
    main(["report", str(directory), str(log), "--page", str(page)])
    text = page.read_text()
    for part in ("53.00 ± 0.71", "made up", "abacus", "seeds: 0, 1", "Single runs", "diverged", "51.60"):
        assert part in text
    figures = {path.name for path in (directory / "docs" / "results").iterdir()}
    assert f"{directory.name}-mnist.png" in figures and {Path(name).suffix for name in figures} == {".png"}
    assert f"results/{directory.name}-mnist.png" in text
    assert "53.00" in capsys.readouterr().out


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Not there"):
        main(["report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match=r"neither table\.json nor results\.jsonl"):
        main(["report", str(tmp_path)])
    (tmp_path / "unfinished.jsonl").write_text(json.dumps({"kind": "header"}) + "\n")
    main(["report", str(tmp_path / "unfinished.jsonl"), "--page", str(tmp_path / "page.md")])
    assert "No finished run" in (tmp_path / "page.md").read_text()


def test_without_a_page_nothing_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(directory)
    before = sorted(directory.rglob("*"))
    main(["report", "."])
    assert "53.00" in capsys.readouterr().out
    assert sorted(directory.rglob("*")) == before


def test_a_page_needs_the_name_of_a_file(directory: Path) -> None:
    (directory / "is.md").mkdir()
    for name in ("results", "is.md"):
        with pytest.raises(SystemExit, match=f"--page .*{name} is no name of a file"):
            main(["report", str(directory), "--page", str(directory / name)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"kind": "recorded", "seed": 0, "losses": []}\n', "lines of the kind 'recorded'"),
        ("# a page\n", "no line of a log"),
        ("[1]\n", "no line of a log"),
        (b"\x89PNG\xff", "no line of a log"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=f"file has {said}, not the log of a run. Name logs"):
        main(["report", str(file)])


def test_each_section_has_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also where a directory has the name that the section of single runs has, or ends as a problem's name begins."""
    names = ["a/table-1", "b/table-1", "c/runs", "c/t", "c/t-vgg8"]
    for name in names:
        problem, column = ("vgg8-mnist", "valid_accuracy") if name == "c/t" else ("mnist", "train_loss")
        run = lines(paper_cell(problem, "adam", epochs=1), [500.0, 60.0], column=column)
        records.append(tmp_path / name / RESULTS, to_line(run))
    records.replace(tmp_path / "log.jsonl", lines(paper_cell("mnist", "adam", epochs=1), [500.0, 60.0]))
    paths = [str(tmp_path / name) for name in [*names, "log.jsonl"]]
    main(["report", *paths, "--page", str(tmp_path / "page.md")])
    capsys.readouterr()
    shown = re.findall(r"\]\((.*\.png)\)", (tmp_path / "page.md").read_text())
    assert len(set(shown)) == len(paths)
    assert all((tmp_path / path).exists() for path in shown)
