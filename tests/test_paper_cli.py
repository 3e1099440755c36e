"""The commands, as a person types them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.paper import records
from examples.paper.cli import COMMANDS, main
from examples.paper.jobs import ROOT
from tests.test_paper_problems import write_cifar10, write_cifar100


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_names_every_command_and_option(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m examples.paper" in text
    assert command or all(name in text for name in COMMANDS)


def test_show_lists_what_there_is(capsys: pytest.CaptureFixture) -> None:
    main(["show"])
    text = capsys.readouterr().out
    assert "kbfgs-dagger" in text and "resnet32-cifar100" in text and "table-8" in text


@pytest.mark.parametrize("problem", ["resnet32-cifar10", "resnet32-cifar100"])
@pytest.mark.parametrize("method", ["kbfgs", "sgdm"])
def test_cifar_runs_and_resumes(problem: str, method: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path, 4)
    write_cifar100(tmp_path, 16)
    log = tmp_path / "log.jsonl"
    command = ["run", "--problem", problem, "--method", method, "--best", "--out", str(log), "--batch-size", "4"]
    command += ["--data-root", str(tmp_path), "--data-limit", "8", "--threads", "1", "--keep-checkpoint"]
    main([*command, "--epochs", "1"])
    main([*command, "--epochs", "2", "--resume"])
    lines = records.read(log)
    assert [line["kind"] for line in lines] == ["header", "epoch", "epoch", "epoch", "end"]
    assert lines[-1]["iteration"] == 4 and len(lines[0]["resumed"]) == 1
    assert 0 <= lines[-2]["valid_accuracy"] <= 100


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "examples.paper", "run", "--problem", "digits", "--method", "adam", "--best"]
    done = subprocess.run([*command, "--max-steps", "2", "--out", str(log)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout and "iteration 2" in done.stderr
    assert records.read(log)[0]["command"].endswith(f"--out {log}")


def test_a_run_without_hyperparameters_says_what_to_give(tmp_path: Path) -> None:
    run = ["run", "--problem", "digits", "--out", str(tmp_path / "log.jsonl"), "--epochs", "1", "--method"]
    with pytest.raises(SystemExit, match="--best"):
        main([*run, "adam"])
    with pytest.raises(SystemExit, match="needs a damping"):
        main([*run, "adam", "--lr", "0.1"])


def test_tensorboard_is_imported_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = ["run", "--problem", "digits", "--method", "sgdm", "--best", "--max-steps", "1"]
    main([*run, "--out", str(tmp_path / "log.jsonl")])
    with pytest.raises(SystemExit, match="pip install tensorboard"):
        main([*run, "--out", str(tmp_path / "log.jsonl"), "--tensorboard", str(tmp_path)])


def test_run_takes_subnormal_numbers_for_zero(tmp_path: Path) -> None:
    tiny = torch.full((8,), torch.finfo(torch.float32).tiny)
    assert (tiny / 2 > 0).all()
    command = ["run", "--problem", "digits", "--method", "sgdm", "--best", "--max-steps", "1", "--threads", "1"]
    main([*command, "--out", str(tmp_path / "log.jsonl")])
    assert (tiny / 2 == 0).all()


def test_so_does_every_thread_that_torch_starts() -> None:
    program = """
import torch
from examples.paper import environment
environment.prepare(2)
assert torch.get_num_threads() == 2
x = torch.full((2**22,), torch.finfo(torch.float32).tiny)
assert (x / 2).count_nonzero() == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
