"""results/ has what its README says, each run once, and pages show its numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.paper.cli import main
from examples.paper.sources import logs
from workloads.methods import METHODS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FILES = sorted(path.name for path in RESULTS.glob("*.jsonl"))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_the_readme_counts_the_lines_of_every_file() -> None:
    rows = re.findall(r"^\| `(.*\.jsonl)` \| (\d+) \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [(name, str(len(lines(name)))) for name in FILES]
    assert {path.name for path in RESULTS.iterdir()} == {*FILES, "README.md"}


@pytest.mark.parametrize("name", FILES)
def test_a_run_is_there_once_with_its_machine_and_command(name: str) -> None:
    runs = [line["header"] for line in lines(name) if line.get("kind") == "result"]
    assert len({run["key"] for run in runs}) == len(runs)
    if name != "quickstart-cnn-mnist.jsonl":
        for about in runs or lines(name):
            assert about["command"].startswith("python -m ")
            assert {"torch", "kfqn-ext"} <= about["environment"]["versions"].keys()


def test_vgg8_with_directions_in_bfloat16() -> None:
    page = (ROOT / "docs/performance.md").read_text().partition("<!-- vgg8 -->")[2].partition("<!-- end of vgg8 -->")[0]
    rows = []
    for header, *epochs, _ in logs(RESULTS / "vgg8-mnist-bfloat16.jsonl"):
        first, last = epochs[1:]
        cells = [METHODS[header["cell"]["method"]].title, header["cell"]["seed"]]
        cells += [f"{epoch['minibatch_loss']:.4f}" for epoch in (first, last)]
        cells += [f"{epoch['valid_accuracy']:.2f}" for epoch in (first, last)]
        cells += [f"{last['state_bytes'] / 2**20:.1f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    assert [line for line in page.splitlines() if line.startswith("| K-BFGS")] == rows


def test_the_quickstart_s_cnn() -> None:
    (record,) = lines("quickstart-cnn-mnist.jsonl")
    accuracies, losses = record["test_accuracy"], record["train_loss"]
    text = (
        f"Test accuracy by epoch: {', '.join(f'{accuracy:.2%}' for accuracy in accuracies)}; "
        f"training loss {', '.join(f'{loss:.4f}' for loss in losses)} "
        f"(batch {record['batch_size']}, seed {record['seed']}, {record['threads']} thread, torch {record['torch']},"
    )
    assert text in " ".join((ROOT / "docs/results.md").read_text().split())


def run(out: Path, *more: str) -> None:
    main(["run", "--problem", "digits", "--method", "sgdm", "--best", "--max-steps", "2", "--out", str(out), *more])


def test_what_is_gathered_are_the_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        run(tmp_path / f"{seed}.jsonl", "--seed", str(seed))
    begun = tmp_path / "begun.jsonl"
    begun.write_text((tmp_path / "0.jsonl").read_text().rpartition('{"kind": "end"')[0].replace("seed0", "seed2"))
    out = tmp_path / "out" / "all.jsonl"
    main(["gather", str(tmp_path / "0.jsonl"), str(begun), "--out", str(out)])
    main(["gather", str(tmp_path / "1.jsonl"), "--out", str(out)])
    assert "2 runs in" in capsys.readouterr().out
    assert logs(out) == [log for seed in (0, 1) for log in logs(tmp_path / f"{seed}.jsonl")]


def test_a_run_that_is_gathered_again_takes_its_old_one_s_place(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "all.jsonl"
    starts = []
    for _ in range(2):
        run(log)
        main(["gather", str(log), "--out", str(out)])
        starts.append(logs(out)[0][1]["seconds"])
    assert logs(out) == logs(log)


@pytest.mark.slow
def test_a_gathered_table_is_the_section_that_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, file = tmp_path / "digits", tmp_path / "gathered" / "digits.jsonl"
    main(["table", "digits", "--methods", "sgdm", "--seeds", "1", "--max-steps", "1", "--out", str(table)])
    main(["gather", str(table), "--out", str(file)])
    bodies = []
    for source in (table, file):
        page = tmp_path / source.parent.name / "page.md"
        main(["report", str(source), "--page", str(page)])
        bodies.append(page.read_text().partition("## ")[2])
    capsys.readouterr()
    assert bodies[0] == bodies[1] and "(`digits`)" in bodies[0]


def test_what_can_not_be_gathered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, log, out = tmp_path / "table", tmp_path / "log.jsonl", tmp_path / "all.jsonl"
    with pytest.raises(SystemExit, match="Not there: .*log"):
        main(["gather", str(log), "--out", str(out)])
    run(log)
    main(["table", "digits", "--methods", "sgdm", "--seeds", "1", "--max-steps", "1", "--out", str(table)])
    with pytest.raises(SystemExit, match="runs of digits and no table, and a file has one table"):
        main(["gather", str(log), str(table), "--out", str(out)])
    (tmp_path / "page.md").write_text("# a page\n")
    with pytest.raises(SystemExit, match="page.md has no line of a log"):
        main(["gather", str(tmp_path / "page.md"), "--out", str(out)])
    assert not out.exists()
