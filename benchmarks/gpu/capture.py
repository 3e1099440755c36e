"""A step that is not due as a CUDA graph: does it move the parameters as the step itself, and what does it take?"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place, Run
from benchmarks.problems import Setup
from benchmarks.report import markdown
from kfqn_ext.optim import KBFGS, KroneckerOptimizer, OnePassKBFGS

_SELDOM = 10**6
_STEPS = 4
_OPTIMIZERS: dict[str, Callable[..., KroneckerOptimizer]] = {
    "onepass": OnePassKBFGS,
    "untuned": KBFGS,
    "kbfgs": KBFGS.as_printed,
}


def measure(place: Place) -> dict[str, Any]:
    """By optimizer and dtype of its direction, on the residual network."""
    return {
        f"{name}, {'float32' if dtype is None else 'bfloat16'}": _compare(place, make, dtype)
        for name, make in _OPTIMIZERS.items()
        for dtype in (None, torch.bfloat16)
    }


def _compare(place: Place, make: Callable[..., KroneckerOptimizer], dtype: torch.dtype | None) -> dict[str, float]:
    moved, times = zip(*(_run(place, make, dtype, as_graph) for as_graph in (False, True)), strict=True)
    change = max(_relative(p, q) for p, q in zip(*moved, strict=True))
    return {"difference": change, "step": times[0], "graph": times[1]}


def _run(
    place: Place, make: Callable[..., KroneckerOptimizer], dtype: torch.dtype | None, as_graph: bool
) -> tuple[list[Tensor], float]:
    """The parameters after some steps along one gradient, and the milliseconds of the last step."""
    setup = place.set_up("resnet32")
    optimizer = make(setup.model, curvature_update_freq=_SELDOM, direction_dtype=dtype)
    optimizer.step(setup.batch)  # makes the initial curvature
    optimizer.step()  # and the copies of the inverses
    step = captured(place, optimizer.step) if as_graph else optimizer.step
    times = [place.milliseconds(step) for _ in range(_STEPS)]
    return _parameters(setup), times[-1]


def captured(place: Place, step: Run) -> Run:
    """A step as a graph to be replayed, which capturing does not run; on a CPU, which has none, the step itself."""
    if not place.is_gpu:
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _parameters(setup: Setup) -> list[Tensor]:
    return [p.detach().clone() for p in setup.model.parameters()]


def _relative(p: Tensor, q: Tensor) -> float:
    return ((p - q).norm() / p.norm().clamp(min=1e-30)).item()


def render(found: dict[str, Any]) -> str:
    rows = [["a step that is not due, alone", "ms", "as a graph, ms", "parameters differ by"]]
    for name, row in found.items():
        rows.append([name, f"{row['step']:.2f}", f"{row['graph']:.2f}", f"{row['difference']:.1e}"])
    return markdown(rows)
