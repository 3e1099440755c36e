"""What can't be done ends in a sentence, not in a traceback: what was found, and what to give instead."""

import shlex
import sys
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

from examples.paper.cell import Cell
from examples.paper.cli import main
from examples.paper.commands import recorded
from tests.test_examples import write_mnist
from workloads import environment, records


def run(out: Path, *more: str) -> None:
    main(["run", "--problem", "digits", "--method", "kbfgs", "--best", "--epochs", "1", "--out", str(out), *more])


def refusal(out: Path, *more: str) -> str:
    with pytest.raises(SystemExit) as end:
        run(out, *more)
    assert isinstance(end.value.code, str)
    return end.value.code


@pytest.mark.parametrize("name", ["evaluate-every", "batch-size", "data-limit", "update-freq", "stats-update-freq"])
@pytest.mark.parametrize("value", ["0", "-2"])
def test_counts_of_at_least_1(name: str, value: str, tmp_path: Path) -> None:
    message = refusal(tmp_path / "log.jsonl", f"--{name}", value)
    assert message.startswith(f"{name.replace('-', '_')} can't be {value}: ") and "Give a number, 1 or more" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["lr", "damping", "weight-decay", "seconds", "epochs", "max-steps", "decay-every"])
def test_values_of_at_least_0(name: str, tmp_path: Path) -> None:
    whole = name in ("epochs", "max-steps", "decay-every")
    for value in ["-1"] if whole else ["-0.01", "nan", "inf"]:
        message = refusal(tmp_path / "log.jsonl", f"--{name}", value)
        assert f"{name.replace('max-', '').replace('-', '_')} can't be {float(value):g}" in message
    assert not list(tmp_path.iterdir())


def test_damping_is_above_0_where_something_is_inverted(tmp_path: Path) -> None:
    assert "damping can't be 0 for kbfgs" in refusal(tmp_path / "log.jsonl", "--damping", "0")
    assert Cell("digits", "adam", 0.1, 0.0, epochs=1).damping == 0
    with pytest.raises(ValueError, match="or geometric or early"):
        Cell("digits", "kbfgs", 0.1, 0.1, update_freq="rarely", epochs=1)


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in refusal(tmp_path / "log.jsonl", "--device", "cuda")
    assert "1 or more" in refusal(tmp_path / "log.jsonl", "--threads", "-1")
    with pytest.raises(SystemExit, match="--device cpu"):
        main(["recorded", "--device", "cuda", "--out", str(tmp_path / "log.jsonl")])


def test_a_run_that_can_not_be_resumed(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run(log)
    assert "finished run" in refusal(log, "--resume")
    run(log, "--keep-checkpoint")
    assert "seed 0, not 1" in refusal(log, "--resume", "--seed", "1")
    assert "used up" in refusal(log, "--resume", "--max-steps", "2")


def test_data_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*args, **options):
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    command = ["recorded", "--data-root", str(tmp_path), "--out", str(tmp_path / "log.jsonl")]
    with pytest.raises(SystemExit, match="fetch it with --download"):
        main(command)
    with pytest.raises(SystemExit, match="could not be downloaded from .*no network"):
        main([*command, "--download"])
    assert "could not be downloaded" in refusal(tmp_path / "log.jsonl", "--problem", "faces", "--download")


def test_recorded_takes_epochs_and_minibatches_that_there_are(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    command = ["recorded", "--data-root", str(tmp_path), "--out", str(tmp_path / "log.jsonl")]
    for wrong in (["--batch-size", "0"], ["--batch-size", "301"], ["--epochs", "0", "--batch-size", "9"]):
        with pytest.raises(SystemExit, match=f"{wrong[0]} {wrong[1]}: "):
            main([*command, *wrong])


@pytest.mark.slow
def test_recorded_runs_again_what_it_has_only_shorter_or_in_other_minibatches(
    tmp_path: Path,
) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    out = tmp_path / "log.jsonl"
    command = ["recorded", "--data-root", str(tmp_path), "--targets", "0", "--out", str(out)]
    for epochs, batch_size in ((1, 100), (2, 100), (1, 150), (1, 100), (2, 100)):
        main([*command, "--epochs", str(epochs), "--batch-size", str(batch_size)])
    lines = records.read(out)
    assert [(line["epochs"], line["batch_size"]) for line in lines] == [(1, 100), (2, 100), (1, 150)]
    assert [len(line["losses"]) for line in lines] == [1, 2, 1] and lines[0]["losses"] == lines[1]["losses"][:1]
    table = recorded.render(out)
    assert table.count("| 9999, m = 100 |") == 1 and table.count("| 9999, m = 150 |") == 1
    assert f"{lines[1]['losses'][1]:.2f}" in table  # of the two that begin alike, the longer


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "--out", "runs/a b.jsonl", "--found", "it's"]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    assert shlex.split(environment.command("examples.paper")) == ["python", "-m", "examples.paper", *arguments]
