"""Reports: what is on the page follows from the logs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.paper import records
from examples.paper.cli import main
from examples.paper.defaults import paper_cell
from examples.paper.page import describe, provenance
from examples.paper.results import RESULTS, found, load, to_line
from examples.paper.summary import main_table, mean_and_error, mean_curve, remarks, to_reach
from examples.paper.tables import TABLES, cells_of

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
    cells = cells_of(TABLES["table-1"], values="found", seeds=[7, 8], budget={"epochs": 1}, changes={}, found=values)
    assert {(c.method, c.seed) for c in cells} == {(m, s) for m in ("kbfgs", "kfac") for s in (7, 8)}


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
    assert f"{directory.name}-mnist.png" in figures and f"{directory.name}-mnist.pdf" in figures
    assert f"results/{directory.name}-mnist.png" in text
    assert "53.00" in capsys.readouterr().out


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Not there"):
        main(["report", str(tmp_path / "nowhere")])
    (tmp_path / "unfinished.jsonl").write_text(json.dumps({"kind": "header"}) + "\n")
    main(["report", str(tmp_path / "unfinished.jsonl"), "--page", str(tmp_path / "page.md")])
    assert "No finished run" in (tmp_path / "page.md").read_text()
