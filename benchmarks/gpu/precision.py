"""What TF32 and bfloat16 make of the direction H_G M H_A, and what it takes in each."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.report import markdown
from kfqn_ext.optim import KBFGS
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner.rounded import RoundedInverses

_STEPS = 10
# How float32 products run, and the dtype that the inverses are rounded to.
_WAYS: dict[str, tuple[str, torch.dtype | None]] = {
    "float32": ("highest", None),
    "TF32": ("high", None),
    "bfloat16": ("highest", torch.bfloat16),
}


@torch.no_grad()
def measure(place: Place) -> dict[str, Any]:
    """On the autoencoder after some steps: milliseconds of all directions, and their errors beside float64's."""
    setup = place.set_up("autoencoder")
    optimizer = KBFGS(setup.model)
    for _ in range(_STEPS):
        optimizer.step(setup.batch)
    rounded = RoundedInverses(warn)
    exact = [p.double() for p in _directions(optimizer, rounded, None, torch.float64)]
    found = {}
    for name, (products, dtype) in _WAYS.items():
        with _products(products):
            directions = _directions(optimizer, rounded, dtype)
            times = [
                place.milliseconds(lambda dtype=dtype: _directions(optimizer, rounded, dtype))
                for _ in range(place.turns)
            ]
        errors = [((p - q).norm() / q.norm()).item() for p, q in zip(directions, exact, strict=True)]
        found[name] = {"ms": median(times), "median error": median(errors), "largest error": max(errors)}
    return found


def _directions(
    optimizer: KBFGS, rounded: RoundedInverses, dtype: torch.dtype | None, working: torch.dtype = torch.float32
) -> list[Tensor]:
    found = []
    for block in optimizer._blocks():
        state = {key: _as(value, working) for key, value in block.state.items()}
        view = rounded.view(block.layer.weight, block.state if working == torch.float32 else state, dtype)
        found.append(blocks.precondition(view, optimizer.recipe, state["momentum"]))
    return found


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def render(found: dict[str, Any]) -> str:
    rows = [["directions of the autoencoder", "ms", "median error", "largest error"]]
    for name, row in found.items():
        rows.append([name, f"{row['ms']:.3f}", *(f"{row[key]:.1e}" for key in ("median error", "largest error"))])
    return markdown(rows)
