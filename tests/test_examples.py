"""The examples run as a reader runs them: as scripts, from another directory."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from examples import hessian_ladder

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(directory: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / script), *args]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # beside other tests, threads wait for each other
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240, env=one_thread)


def test_quickstart(tmp_path: Path) -> None:
    done = run(tmp_path, "quickstart.py", "--quick", "--out", "curves/digits.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "curves/digits.png").read_bytes().startswith(b"\x89PNG")
    for words in ("q.dh_bar", "relative difference", "K-BFGS(L)", "Adam", "SGD", "test accuracy"):
        assert words in done.stdout


@pytest.mark.slow
def test_quickstart_says_so_where_it_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "quickstart.py", "--epochs", "0", "--runs", "1")
    assert done.returncode == 1
    assert "Less than 95 % test accuracy: K-BFGS, " in done.stdout


@pytest.mark.parametrize("name", ["kbfgs", pytest.param("adam", marks=pytest.mark.slow)])
def test_mnist_cnn(name: str, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data/MNIST/raw")
    arguments = ("--data-root", "data", "--epochs", "2", "--batch-size", "30")
    done = run(tmp_path, "mnist_cnn.py", "--optimizer", name, *arguments)
    (record,) = [json.loads(line) for line in (tmp_path / "runs/mnist_cnn.jsonl").read_text().splitlines()]
    assert record["optimizer"] == name
    assert done.returncode == (0 if record["test_accuracy"][-1] >= 0.99 else 1), done.stdout + done.stderr
    assert record["train_loss"][1] < record["train_loss"][0] < 2.3
    assert len(record["seconds"]) == 2


def write_mnist(directory: Path) -> None:
    """Digits of 8 × 8 pixels, enlarged to 28 × 28, in MNIST's file format."""
    directory.mkdir(parents=True)
    images, labels = load_digits(return_X_y=True)
    images = np.pad(images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2))) * 15
    for name, part in (("train", slice(0, 300)), ("t10k", slice(300, 400))):
        for kind, values in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            (directory / f"{name}-{kind}-ubyte").write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.mark.slow
def test_mnist_cnn_without_data_and_network_says_so_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    done = run(tmp_path, "mnist_cnn.py", "--epochs", "1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "MNIST can neither be read" in done.stderr and "--data-root" in done.stderr and "refused" in done.stderr


@pytest.mark.slow
def test_mnist_cnn_says_so_where_a_file_was_cut_short(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data/MNIST/raw")
    (tmp_path / "data/MNIST/raw/train-images-idx3-ubyte").write_bytes(b"")
    done = run(tmp_path, "mnist_cnn.py", "--epochs", "1")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "or delete" in done.stderr


@pytest.mark.parametrize("options", [[], ["--quick"]])
def test_each_part_of_the_ladder_has_its_threads_and_says_the_steps_that_it_took(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, steps = [9], []
    report = SimpleNamespace(plot=lambda path: None, to_markdown=lambda columns: "")
    monkeypatch.setattr(hessian_ladder, "estimate_curvature", lambda *_, **__: report)
    monkeypatch.setattr(hessian_ladder, "train", lambda *arguments: steps.append(arguments[3]) or 0.5)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    for part in ("ladder", "track"):
        _, threads = hessian_ladder.PARTS[part]
        monkeypatch.setitem(hessian_ladder.PARTS, part, (lambda *_: f"{asked[-1]} thread", threads))
    hessian_ladder.main([*options, "--out", str(tmp_path), "--only", "ladder", "resnet32", "track"])
    ladder, wide, track = ((tmp_path / f"{part}.md").read_text() for part in ("ladder", "resnet32", "track"))
    assert ladder.strip() == track.strip() == "1 thread"
    assert f"after {steps[0]} steps of K-BFGS" in wide and "on 2 threads" in wide
