"""The page docs/experiments/README.md is what `report` makes of the files that it names."""

from pathlib import Path

import pytest

from examples.paper.cli import main
from examples.paper.results import load
from tests.test_paper_rows import DOCS
from tests.test_results import RESULTS

EXPERIMENTS = DOCS / "experiments"
# As they follow each other on the page.
SOURCES = ["table-1", "curves-generated", "cnn-mnist", "cnn-mnist-search", "mnist-autoencoder-long"]


def sources() -> list[Path]:
    return [RESULTS / f"{name}.jsonl" for name in SOURCES]


def body(page: Path) -> str:
    """All but the line that tells the command, in which paths differ."""
    return "\n".join(line for line in page.read_text().splitlines() if not line.startswith("Made by"))


def test_the_page_is_made_from_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", *map(str, sources()), "--page", str(tmp_path / "README.md")])
    capsys.readouterr()
    assert body(tmp_path / "README.md") == body(EXPERIMENTS / "README.md")
    assert " ".join(f"results/{name}.jsonl" for name in SOURCES) in (EXPERIMENTS / "README.md").read_text()
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {path.name for path in (EXPERIMENTS / "figures").iterdir()}


def test_every_finished_run_tells_its_machine_and_command() -> None:
    results = load(sources())
    assert len(results) > 50
    for result in results:
        assert result.header["command"].startswith("python -m examples.paper ")
        assert {"torch", "kfqn-ext"} <= result.header["environment"]["versions"].keys()


def test_what_is_said_of_adam_is_in_its_logs() -> None:
    text = " ".join((DOCS / "results.md").read_text().split())
    results = {result.cell.method: result for result in load([RESULTS / "mnist-autoencoder-long.jsonl"])}
    for name in ("adam", "adam-2020"):
        result = results[name]
        losses = result.epochs.dropna(subset="train_loss").set_index("epoch")["train_loss"]
        first = {
            level: next((int(e) for e, loss in losses.items() if loss <= level), None) for level in (60, 56, 54, 52.76)
        }
        if name == "adam-2020":
            assert f"passes 60 after {first[60]} epochs, 56 after {first[56]} and 54 after {first[54]}" in text
            assert f"comes to {losses[first[52.76]]:.2f} after {first[52.76]}" in text
        else:
            assert f"60 takes {first[60]} epochs" in text and f"56 takes {first[56]} " in text
            assert first[52.76] is None
            assert f"is at {losses.iloc[-1]:.2f} after {int(losses.index[-1]):,}" in text


def test_the_first_table_of_results_has_the_page_s_numbers() -> None:
    """Each row: losses after some epochs, seconds and the paper's number, then the best of the long run."""
    tables = (EXPERIMENTS / "README.md").read_text().split("## Single runs")
    rows = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
        for part in (tables[0].partition("## Training loss on generated curves")[0], tables[1])
    ]
    short, long = ({name: [row for row in part if row[0] == name] for name in {r[0] for r in part}} for part in rows)
    top = (DOCS / "results.md").read_text().partition("## Details")[0]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in top.splitlines() if line[:1] == "|"][2:]
    assert len(shown) == 6
    for name, _, *losses, seconds, paper, best in shown:
        summary, curve = short[name][0], short[name][1]
        assert losses == [curve[1], curve[3], curve[5]] and losses[-1] == summary[3].split(" ")[0]
        assert seconds == summary[6].split(" ")[0] and paper == summary[8]
        assert best == (long[name][0][4] if name in long else "")
