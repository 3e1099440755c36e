"""A rank fails inside a step: the others end with torch's error, in time; the last checkpoint goes on with fewer."""

import datetime
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kfqn_ext.optim import KBFGS, Minibatch
from kfqn_ext.optim.passes.ranks.bucket import Bucket
from tests.distributed.cases import data, mlp, same, share

RANKS, BEFORE, AFTER = 2, 3, 3
TIMEOUT, LIMIT = 4.0, 120.0  # seconds: of the process group, and of a process, which then says where it hangs


class BatteryError(Exception):
    """Of the user's own code."""


def optimizer_of(model: nn.Module, **options: Any) -> KBFGS:
    return KBFGS.as_printed(model, lr=0.1, damping=0.5, curvature_update_freq=1, **options)


def minibatch(model: nn.Module, k: int) -> Minibatch:
    """All data, or a rank's share."""
    x, y = data("mlp", k)
    if dist.is_initialized():
        x, y = (share(t, (len(t) // RANKS,) * RANKS) for t in (x, y))
    return Minibatch(model, F.cross_entropy, x, y)


class Failing:
    """A closure that fails in the second pass: the others wait for what that has measured."""

    def __init__(self, batch: Minibatch) -> None:
        self.batch, self.calls = batch, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise BatteryError("empty")
        return self.batch()


def killed(bucket: Bucket) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def work(rank: int, ending: str, folder: str) -> None:
    """Train, save, and fail as one rank; as the other, write down how the step ended."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.stderr)
    torch.set_num_threads(1)
    patient, impatient = (datetime.timedelta(seconds=seconds) for seconds in (LIMIT, TIMEOUT))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=patient)
    model = DDP(mlp(), process_group=dist.new_group(timeout=impatient))  # processes may start long after one another
    optimizer, told = optimizer_of(model, shard_state=True), Path(folder, "told.txt")
    for k in range(BEFORE):
        optimizer.step(minibatch(model, k))
    whole = optimizer.gather_state()
    if rank == 0:
        torch.save([model.module.state_dict(), whole], Path(folder, "saved.pt"))
    batch: Any = minibatch(model, BEFORE)
    if rank > 0 and ending == "is killed in a message":
        Bucket.sums = killed  # type: ignore[method-assign]
    elif rank > 0:
        batch = Failing(batch)
    start = time.monotonic()
    try:
        optimizer.step(batch)
    except BatteryError:
        while ending == "goes on with something else" and not told.exists():
            time.sleep(0.05)
        os._exit(3)
    except RuntimeError as error:  # DistBackendError among them
        told.write_text(f"{time.monotonic() - start:.2f} {type(error).__name__} {error}")
        os._exit(0)  # the group is broken: nobody is left to say goodbye to


ENDINGS = "ends", "is killed in a message", pytest.param("goes on with something else", marks=pytest.mark.slow)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_fails(ending: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, ending, str(tmp_path))) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT + 10)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL if "killed" in ending else 3]
    seconds, kind, message = (tmp_path / "told.txt").read_text().split(" ", 2)
    assert kind in ("RuntimeError", "DistBackendError", "DistNetworkError"), message
    assert float(seconds) < TIMEOUT + 6  # of a machine that does other things too

    model, twin = mlp(), mlp()
    optimizer, reference = optimizer_of(model), optimizer_of(twin)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for k in range(BEFORE + AFTER):
        reference.step(minibatch(twin, k))
        if k >= BEFORE:
            optimizer.step(minibatch(model, k))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        same(p, q)
