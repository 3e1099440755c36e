"""The examples run as a reader runs them: as scripts, from another directory."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

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


def test_quickstart_says_so_where_it_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "quickstart.py", "--epochs", "0", "--runs", "1")
    assert done.returncode == 1
    assert "Less than 95 % test accuracy: K-BFGS, " in done.stdout


def test_mnist_cnn(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data/MNIST/raw")
    arguments = ("--data-root", "data", "--epochs", "2", "--batch-size", "30")
    runs = [run(tmp_path, "mnist_cnn.py", "--optimizer", name, *arguments) for name in ("kbfgs", "adam")]
    records = [json.loads(line) for line in (tmp_path / "runs/mnist_cnn.jsonl").read_text().splitlines()]
    assert [record["optimizer"] for record in records] == ["kbfgs", "adam"]
    for done, record in zip(runs, records, strict=True):
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
