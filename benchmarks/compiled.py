"""``torch.compile`` of what a step is made of, off and on: ``python -m benchmarks.compiled``.

Milliseconds of process time in one thread, medians, and the seconds by the clock until the compiler has done. Its
caches are off, so that another run's code is not found there.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from benchmarks import options
from benchmarks.report import markdown
from benchmarks.tried import milliseconds
from kfqn_ext import OnePassKBFGS
from kfqn_ext.linalg import bfgs_updates_each_
from kfqn_ext.linalg.padded import stack
from kfqn_ext.linalg.power_iteration import spectral_norms_, start_vector
from workloads.clock import now

CPU = torch.device("cpu")
Shapes = Sequence[tuple[int, int]]  # (d_out, d_in) of each layer
MLP: Shapes = 9 * [(64, 65)]
RESNET32: Shapes = [
    *[(16, 27), *10 * [(16, 144)], (32, 144), *9 * [(32, 288)], (64, 288)],
    *[*9 * [(64, 576)], (10, 65)],
]
_PAIRS, _WARM_UP = 5, 60


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--quick", action="store_true", help="one case, to see that it runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    rows = []
    for what, measure in tqdm((QUICK if args.quick else CASES).items(), unit="case"):
        torch.manual_seed(0)
        eager, _ = measure(False)
        torch.compiler.reset()
        rows.append([what, eager, *measure(True)])
    options.finish(args, "compiled", CPU, {"rows": rows}, render)


def render(results: dict[str, Any]) -> str:
    """A row a function."""
    rows = [["", "eager, ms", "compiled, ms", "until it is compiled, s"]]
    rows += [[what, f"{eager:.2f}", f"{fast:.2f}", f"{seconds:.0f}"] for what, eager, fast, seconds in results["rows"]]
    return markdown(rows)


@torch.no_grad()
def spectral(shapes: Shapes, compiled: bool) -> tuple[float, float]:
    """The power iteration that sets the lengths of all layers' steps."""
    directions = [torch.randn(shape) for shape in shapes]
    vectors = [start_vector(P[0]) for P in directions]
    return _times(spectral_norms_, directions, vectors, torch.tensor(False), compiled=compiled)


@torch.no_grad()
def updates(shapes: Shapes, compiled: bool) -> tuple[float, float]:
    """Five pairs of the H_A of all layers."""
    sizes = [d_in for _, d_in in shapes]
    s = torch.stack([stack([torch.randn(d) for d in sizes]) for _ in range(_PAIRS)])
    return _times(bfgs_updates_each_, [2.0 * torch.eye(d) for d in sizes], s, 0.7 * s, compiled=compiled)


def _times(function: Callable[..., object], *arguments: object, compiled: bool) -> tuple[float, float]:
    run = partial(torch.compile(function) if compiled else function, *arguments)
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    return milliseconds(run), first


def whole_step(compiled: bool) -> tuple[float, float]:
    """``optimizer.step`` of nine layers, mostly not due; the backward pass does not count."""
    hidden = [module for _ in range(8) for module in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    optimizer = OnePassKBFGS(model, curvature_update_freq=20)
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    x, y = torch.randn(128, 64), torch.randint(10, (128,))
    seconds, start = [], time.perf_counter()
    for k in range(2 * _WARM_UP):
        F.cross_entropy(model(x), y).backward()
        before = now(CPU)
        step()
        seconds.append(now(CPU) - before)
        optimizer.zero_grad()
        if k + 1 == _WARM_UP:
            first = time.perf_counter() - start
    return 1e3 * statistics.median(seconds[_WARM_UP:]), first


# By what a row calls it: (whether to compile it) ↦ milliseconds of a call, and seconds of the first one, or ones.
CASES: dict[str, Callable[[bool], tuple[float, float]]] = {
    "spectral norms, nine layers of 64×65": partial(spectral, MLP),
    "spectral norms, the layers of a ResNet32": partial(spectral, RESNET32),
    "five pairs of each H_A, nine layers": partial(updates, MLP),
    "five pairs of each H_A, a ResNet32": partial(updates, RESNET32),
    "`OnePassKBFGS.step`, nine layers": whole_step,
}
QUICK = {"spectral norms of two layers of 8×9": partial(spectral, 2 * [(8, 9)])}


if __name__ == "__main__":
    main()
