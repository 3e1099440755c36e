"""The commands, as a person types them."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import torch
import tyro
from filelock import FileLock

from examples.paper.cli import COMMANDS, main
from examples.paper.defaults import make_cell
from examples.paper.jobs import ROOT
from examples.paper.sources import RESULTS, TABLE_FILE, describe, to_line
from tests.test_paper_problems import write_cifar10, write_cifar100
from tests.test_paper_report import lines as result_lines
from workloads import records


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_names_every_command_and_option(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m examples.paper" in text
    names = options(COMMANDS[command[0]]) if command else COMMANDS
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)] == []


def options(command: type) -> Iterator[str]:
    """All options of a command, those of its parts too."""
    for name, kind in get_type_hints(command, include_extras=True).items():
        base, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if is_dataclass(base):
            yield from options(base)
        elif tyro.conf.Positional not in notes:
            yield f"--{name.replace('_', '-')}"


def test_every_option_of_the_parts_is_one_of_the_command() -> None:
    assert {"--out", "--jobs", "--max-steps", "--data-root"} <= set(options(COMMANDS["table"]))


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["digits", "--jobs", "0"], "--jobs 0 runs nothing"),
        (["digits", "--jobs", "-1"], "--jobs -1 runs nothing"),
        (["digits", "--seeds", "0"], "--seeds 0 runs nothing"),
        (["digits", "--values", "paper", "--found", "search"], "--found takes the values of a search"),
        (["digits", "--found", "nowhere"], "nowhere has no finished run .* --found"),
        (["digits", "--values", "found"], "out has no finished run .* --found"),
        (["digits", "--methods", "sgdm", "adam", "--found", "search"], "no finished run of adam on digits"),
        (["table-2", "--change", "sgdm.lr=5"], "--change replaces single values, and a grid"),
        (["digits", "--methods", "kbfgs", "--change", "adam.lr=5"], "--change names adam, but the methods are kbfgs"),
        (["digits", "--change", "sgdm.damping=5"], "sgdm has no damping; it has lr, weight_decay"),
        (["digits", "--change", "kfac.update_freq=often"], "update_freq takes .* geometric, or early, not 'often'"),
        (["digits", "--change", "kfac.update_freq=0"], "update_freq takes .*, not '0'"),
        (["digits", "--change", "kfac.lr=fast"], "lr takes a number, not 'fast'"),
        (["table-2", "--methods", "adam-2020"], "The paper has no search range for adam-2020 on mnist"),
        (["cnn-small", "--methods", "provable"], "no search range for provable on vgg8-mnist"),
    ],
)
def test_a_table_that_would_run_nothing_or_another_thing_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = result_lines(make_cell("digits", "sgdm", {"lr": 0.5, "epochs": 1}), [9.0, 5.0])
    records.append(Path("search") / RESULTS, to_line(run))
    with pytest.raises(SystemExit, match=said):
        main(["table", *options, "--out", "out"])
    assert not Path("out").exists()


def test_found_alone_takes_the_values_of_the_search(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = result_lines(make_cell("digits", "sgdm", {"lr": 0.5, "epochs": 1}), [9.0, 5.0])
    records.append(tmp_path / RESULTS, to_line(run))
    command = ["table", "digits", "--methods", "sgdm", "--seeds", "1", "--out", str(tmp_path / "out"), "--dry-run"]
    main([*command, "--found", str(tmp_path)])
    assert "lr 0.5" in capsys.readouterr().out


def test_a_directory_keeps_the_table_that_it_has(tmp_path: Path) -> None:
    command = ["table", "digits", "--methods", "sgdm", "--seeds", "1", "--max-steps", "1", "--out", str(tmp_path)]
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit, match="Another run is working"):
        main(command)
    assert not (tmp_path / TABLE_FILE).exists()
    describe(tmp_path, "table-1")
    with pytest.raises(SystemExit, match="holds results of table-1, .* name another for digits"):
        main(command)
    assert json.loads((tmp_path / TABLE_FILE).read_text()) == {"table": "table-1"}


@pytest.mark.slow
def test_what_a_table_says_is_next_makes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "a directory"
    main(["table", "digits", "--methods", "sgdm", "--seeds", "1", "--max-steps", "1", "--out", str(out)])
    _, _, command = capsys.readouterr().out.partition("python -m examples.paper ")
    main(shlex.split(command))
    assert "SGD-m" in (out / "README.md").read_text()
    assert (out / "figures" / "a directory-digits.png").exists()


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
from workloads import environment
environment.prepare(2)
assert torch.get_num_threads() == 2
x = torch.full((2**22,), torch.finfo(torch.float32).tiny)
assert (x / 2).count_nonzero() == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
