"""The two examples about the theory run, find what they claim, and say so by their exit code."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = ("provable_convergence", "learning_the_inverse")


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, int]:
    module = importlib.import_module(f"examples.{name}")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    threads = torch.get_num_threads()
    try:
        return module, module.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["provable_convergence", pytest.param("learning_the_inverse", marks=pytest.mark.slow)])
def test_it_runs_and_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new folder" / "picture.png"
    monkeypatch.chdir(tmp_path)
    _, code = run(name, monkeypatch, "--quick", "--out", str(picture))
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "Does not hold" not in printed and "picture.png" in printed.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert [p.name for p in tmp_path.iterdir()] == ["new folder"]  # it writes nothing else


def test_a_bound_that_is_broken_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """With a lemma that promises too much, the example fails and says which claim does not hold."""
    module = importlib.import_module("examples.provable_convergence")
    monkeypatch.setattr(module, "lemma", lambda: (1e-3, 1.0001e-3))
    _, code = run("provable_convergence", monkeypatch, "--steps", "12", "--out", str(tmp_path / "picture.png"))
    assert code == 1 and "Does not hold: κ_low" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_holds_in_full(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, code = run(name, monkeypatch, "--out", str(tmp_path / "picture.png"))
    assert code == 0, capsys.readouterr().out
