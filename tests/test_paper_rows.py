"""The tables in docs/results.md have the rows that the command prints from the logs."""

from pathlib import Path

import pytest

from examples.paper import rows
from examples.paper.sources import logs
from workloads import records

DOCS = Path(__file__).parents[1] / "docs"
RUNS = DOCS.parent / "results" / "mnist-autoencoder.jsonl"


def test_rows_of_the_page_and_of_the_logs_are_the_same() -> None:
    """Cell by cell under its heading, but for empty ones: tables of short runs have fewer columns."""
    page = _rows((DOCS / "results.md").read_text())
    assert len(page) > 20
    assert page == _rows(rows.table(logs(RUNS)))


def _rows(text: str) -> set[tuple[tuple[str, str], ...]]:
    """Each row of the tables of runs in a text: (heading, cell) of all cells with something in them."""
    found, head = set(), None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells or cells[:2] == ["method", "(α, λ), T, seed"]:
            head = cells or None
        elif head is not None and set(cells) != {"---"}:
            found.add(tuple((name, cell) for name, cell in zip(head, cells, strict=True) if cell))
    return found


@pytest.mark.parametrize(
    ("logged", "losses"),
    [
        ([0], {"1": "diverged at iteration 7"}),
        ([0, 1], {"1": "9.00", "4": "diverged at iteration 7"}),
        ([0, 2], {"4": "diverged at iteration 7"}),
        ([0, 1, 2, 3, 4, 5], {"1": "9.00", "4": "9.00", "10": "diverged at iteration 7"}),
        ([0, 4, 10], {"4": "9.00", "10": "9.00, then diverged at iteration 7"}),
    ],
)
def test_a_run_that_diverged_says_so_after_the_last_epoch_it_has(logged: list[int], losses: dict[str, str]) -> None:
    log = logs(RUNS)[0]
    epoch = log[1]
    whole = [log[0], epoch | {"epoch": 10.0, "train_loss": 9.0}, {"kind": "end", "outcome": "finished"}]
    epochs = [epoch | {"epoch": float(e), "iteration": e, "train_loss": 9.0} for e in logged]
    run = [log[0], *epochs, {"kind": "end", "outcome": "diverged", "iteration": 7}]
    found = [dict(row) for row in _rows(rows.table([run, whole]))]
    (row,) = [row for row in found if any("diverged" in cell for cell in row.values())]
    assert {name: cell for name, cell in row.items() if name.isdigit()} == losses


def test_a_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two gathered logs, and of one that has no end yet."""
    gathered, begun = tmp_path / "gathered.jsonl", tmp_path / "begun.jsonl"
    gathered.write_text("".join(RUNS.read_text().splitlines(keepends=True)[:2]))
    records.replace(begun, logs(RUNS)[2][:3])
    rows.main([str(gathered), str(begun), "--figure", str(tmp_path / "out" / "loss.png")])
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    table = capsys.readouterr().out
    assert "| method |" in table and len([line for line in table.splitlines() if line.startswith("| K-BFGS")]) == 3
