"""Two processes: quantities under DistributedDataParallel, averaged, are the whole batch's; an optimizer trains as one.

Run as a script with a rank, a file to meet at, and the name of a function here, it is one of the processes.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions import KBFGSQuantities, extend
from kfqn_ext.optim import KBFGS, Minibatch

RANKS = 2


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(27, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=generator), torch.arange(8) % 3


def averaged(value: Tensor) -> Tensor:
    """One reduction after the backward pass; shards are equal, so the mean over ranks is the mean over data."""
    value = value.clone()
    distributed.all_reduce(value)
    return value / RANKS


def process(rank: int, meeting: str) -> None:
    """Extended before or after wrapping, with every option: averages over ranks are those of the whole batch."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    x, y = data()
    plain, whole = extend(net()), KBFGSQuantities()
    with backpack(whole):
        F.cross_entropy(plain(x), y).backward()
    shard = slice(rank * 4, rank * 4 + 4)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True, "bucket_cap_mb": 1e-4}):
        for extend_first in (True, False):
            model = net()
            if extend_first:
                extend(model)
            ddp = DistributedDataParallel(model, **options)
            extend(model)
            for _ in range(2):  # the first pass of DDP differs from the others
                local = KBFGSQuantities()
                ddp.zero_grad()
                with backpack(local):
                    F.cross_entropy(ddp(x[shard]), y[shard]).backward()
            for i in (0, 3):
                q, want = local[model[i]], whole[plain[i]]
                for name in ("a_bar", "h_bar", "dh_bar"):
                    torch.testing.assert_close(averaged(getattr(q, name)), getattr(want, name))
                s = torch.ones_like(want.a_bar)
                torch.testing.assert_close(averaged(q.A @ s), want.A @ s)
                torch.testing.assert_close(model[i].weight.grad, plain[i].weight.grad)
            # A pass that is not to be reduced: under no_sync, and the next reduced step is as before.
            with ddp.no_sync(), backpack(KBFGSQuantities()):
                F.cross_entropy(ddp(x[shard]), y[shard]).backward()
    alone = KBFGS(net())
    with pytest.raises(RuntimeError, match=r"KBFGS in 2 processes.*KBFGS\(DistributedDataParallel\(model\)\)"):
        alone.step(Minibatch(alone._model, F.cross_entropy, x, y))
    model = DistributedDataParallel(net())
    optimizer = KBFGS(model)
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, x[shard], y[shard]))
    for p in model.parameters():
        assert torch.equal(averaged(p.detach()), p)
    del ddp, model, optimizer  # a wrapper that outlives its group can abort the process as it ends
    distributed.barrier()
    distributed.destroy_process_group()


def divided(rank: int, meeting: str) -> None:
    """FSDP2 by layer: quantities are those of a process's own data, and steps those of one process with all data."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    x, y = data()
    shard, alone = slice(rank * 4, rank * 4 + 4), distributed.new_group([rank], use_local_synchronization=True)
    model, twin = net(), net()
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    local, want = KBFGSQuantities(), KBFGSQuantities()
    for one, ext in ((extend(model), local), (extend(net()), want)):
        with backpack(ext):
            F.cross_entropy(one(x[shard]), y[shard]).backward()
        one.zero_grad()
    for got, expected in zip(local.values(), want.values(), strict=True):
        for name in ("a_bar", "h_bar", "dh_bar"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    optimizer, reference = KBFGS(model), KBFGS(twin, process_group=alone)
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, x[shard], y[shard]))
        reference.step(Minibatch(twin, F.cross_entropy, x, y))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)
    distributed.barrier()
    distributed.destroy_process_group()


def fsdp1() -> None:
    """Refused by name; its constructor asks for a GPU, so that this one has not run it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    model._modules["_fsdp_wrapped_module"] = net()
    with pytest.raises(UnsupportedLayerError, match=r"FullyShardedDataParallel keeps.*fully_shard\(model\)"):
        KBFGS(model)


def cases(*names: str) -> Callable[[], None]:
    """Cases of tests/distributed, by name or by what stands before the colon: its tests run them in two processes."""

    def are_there() -> None:
        from tests.distributed import fsdp_cases, reported_cases  # noqa: F401 - which add to the others
        from tests.distributed.cases import CASES

        known = {*CASES, *(name.partition(":")[0] for name in CASES)}
        assert set(names) <= known, set(names) - known

    return are_there


def trainers(*names: str) -> Callable[[], None]:
    """Loops that tests/distributed/test_trainers.py runs in two processes."""

    def are_there() -> None:
        from tests.distributed.trainer_loops import loops

        assert set(names) <= set(loops(RANKS))

    return are_there


def two_processes(what: str = "process") -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.real.processes"]
        running = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/meeting", what],
                env=environment,
                cwd=root,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            for one in running:
                _, error = one.communicate(timeout=240)
                assert one.returncode == 0, error
        finally:
            for one in running:
                one.kill()


def two_processes_that_share_a_model() -> None:
    two_processes("divided")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"process": process, "divided": divided}[sys.argv[3]](int(sys.argv[1]), sys.argv[2])
