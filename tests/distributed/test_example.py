"""The example as users start it, killed in the middle and resumed on another number of processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def start(ranks: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [*command, "examples/distributed_cnn.py", *arguments],
        cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.timeout(240)
def test_it_trains_and_goes_on_with_fewer_processes_after_one_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "digits.pt"
    run = start(2, "--epochs", "200", "--checkpoint", str(file))
    deadline = time.monotonic() + 120
    while not file.exists():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0 and "Signal 9" in output  # torchrun ends the others

    (done,) = re.findall(r"epoch (\d+)  test accuracy \S+  2 process", output)[-1:]
    run = start(1, "--epochs", str(int(done) + 4), "--checkpoint", str(file))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    found = re.findall(r"epoch (\d+)  test accuracy ([\d.]+)%  1 process", output)
    assert int(found[0][0]) > 1 and int(found[-1][0]) == int(done) + 4
    assert float(found[-1][1]) > 90


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_divided_model_goes_on_as_a_whole_one(tmp_path: Path) -> None:
    file = ["--optimizer", "kbfgs", "--checkpoint", str(tmp_path / "digits.pt")]
    for ranks, form, epochs in ((2, ["--fsdp"], 1), (1, [], 2)):
        run = start(ranks, *form, "--epochs", str(epochs), *file)
        output, _ = run.communicate(timeout=120)
        assert run.returncode == 0, output
        assert re.findall(r"epoch (\d+)  test accuracy", output) == [str(epochs)], output
