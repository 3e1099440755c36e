"""The tables in docs/results.md are what the command prints from the logs beside them."""

import re
from pathlib import Path

import pytest

from examples.paper import rows
from examples.paper.records import read

DOCS = Path(__file__).parents[1] / "docs"
LOGS = sorted(path for path in (DOCS / "results").glob("*.jsonl") if path.name != "mnist-cnn.jsonl")


def test_rows_of_the_page_and_logs_beside_it_are_the_same() -> None:
    """Cell by cell, but for empty ones: tables of short runs have fewer columns."""
    printed = {_cells(line) for line in rows.table([read(path) for path in LOGS]).splitlines()[2:] if line[:1] == "|"}
    page = re.findall(r"^\| (?:K-BFGS|KFAC|Adam|SGD).*\|$", (DOCS / "results.md").read_text(), flags=re.M)
    assert len(page) > 20
    assert {_cells(line) for line in page} == printed


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|") if cell.strip())


def test_a_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.main([*map(str, LOGS[:2]), "--figure", str(tmp_path / "out" / "loss.png")])
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    assert "| method |" in capsys.readouterr().out
