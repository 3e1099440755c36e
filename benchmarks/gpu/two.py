"""Two processes take the steps of one: over NCCL where there are two GPUs."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.place import Place
from kfqn_ext.optim import Minibatch, OnePassKBFGS

_RANKS, _STEPS = 2, 3
_LIMIT = timedelta(seconds=60)


def measure(place: Place) -> dict[str, Any]:
    """How far the parameters of both processes are from those of one that has both halves of the data."""
    if place.is_gpu and torch.cuda.device_count() < _RANKS:
        return {"left out": f"{torch.cuda.device_count()} GPU here"}
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, (place.device.type, folder), nprocs=_RANKS)
        moved = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(_RANKS)]
    alone = _steps(_network(), 0, 1, torch.device("cpu"))
    return {"between them": _apart(*moved), "to one": _apart(moved[0], alone)}


def _apart(some: list[Tensor], others: list[Tensor]) -> float:
    return max((p - q).abs().max().item() for p, q in zip(some, others, strict=True))


def _work(rank: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend, meet = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meet"
    distributed.init_process_group(backend, init_method=meet, rank=rank, world_size=_RANKS, timeout=_LIMIT)
    model = DistributedDataParallel(_network().to(device))
    torch.save(_steps(model, rank, _RANKS, device), Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()


def _steps(model: nn.Module, rank: int, ranks: int, device: torch.device) -> list[Tensor]:
    """The parameters after some steps on a rank's share of the data."""
    optimizer = OnePassKBFGS(model)
    data = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        x, y = torch.rand(8, 1, 6, 6, dtype=torch.float64, generator=data), torch.arange(8) % 3
        x, y = (t.chunk(ranks)[rank].to(device) for t in (x, y))
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    return [p.detach().cpu().clone() for p in model.parameters()]


def render(found: dict[str, Any]) -> str:
    if "left out" in found:
        return f"Left out: {found['left out']}."
    return f"Largest difference of a parameter: {found['between them']:.1e}, to one process {found['to one']:.1e}."
