"""The page docs/experiments/README.md is what `report` makes of the results beside it."""

from pathlib import Path

import pytest

from examples.paper.cli import main
from examples.paper.results import load
from tests.test_paper_rows import DOCS

EXPERIMENTS = DOCS / "experiments"
# As they follow each other on the page.
TABLES = ["table-1", "curves", "cnn", "cnn-grid"]


def sources() -> list[Path]:
    return [*(EXPERIMENTS / name for name in TABLES), *sorted((EXPERIMENTS / "long").glob("*.jsonl"))]


def body(page: Path) -> str:
    """All but the line that tells the command, in which paths differ."""
    return "\n".join(line for line in page.read_text().splitlines() if not line.startswith("Made by"))


def test_the_page_is_made_from_the_results_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", *map(str, sources()), "--page", str(tmp_path / "README.md")])
    capsys.readouterr()
    assert body(tmp_path / "README.md") == body(EXPERIMENTS / "README.md")
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {path.name for path in (EXPERIMENTS / "figures").iterdir()}


def test_every_finished_run_tells_its_machine_and_command() -> None:
    results = load(sources())
    assert len(results) > 50
    for result in results:
        assert result.header["command"].startswith("python -m examples.paper ")
        assert {"torch", "kfqn-ext"} <= result.header["environment"]["versions"].keys()
