"""Ways to A and to A s of a convolution: is what is chosen for a GPU the fastest?"""

from statistics import median
from typing import Any

import torch

from benchmarks import ways
from benchmarks.gpu.place import Place
from benchmarks.report import markdown
from kfqn_ext.linalg import full_precision

_BATCH, _QUICK_BATCH = 128, 2


@torch.no_grad()
@full_precision()  # as curvature is measured, and not in TF32
def measure(place: Place) -> dict[str, Any]:
    """By layer: milliseconds of each way."""
    found = {}
    for shape in ways.SIZES:
        runs = ways.runs(_QUICK_BATCH if place.quick else _BATCH, *shape, device=place.device)
        times = {}
        for name, run in runs.items():
            run()
            times[name] = median(place.milliseconds(run) for _ in range(place.turns))
        found[ways.name(*shape)] = times
    return found


def render(found: dict[str, Any]) -> str:
    head = ["channels of", *next(iter(found.values()))]
    return markdown([head, *([name, *(f"{ms:.3f}" for ms in row.values())] for name, row in found.items())])
