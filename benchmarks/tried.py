"""What was tried for speed and left out, or chosen by: ``python -m benchmarks.tried``.

Products in float32 and bfloat16, directions into kept buffers, layers of equal shape in one batched product, and
``torch.compile`` of the BFGS update, beside five updates one by one and together. Milliseconds of process
time, medians, one thread.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import options
from benchmarks.report import markdown
from kfqn_ext.linalg import bfgs_update_, bfgs_update_each_, bfgs_updates_each_
from workloads.clock import now

PRODUCTS = ((512, 4609), (512, 2305), (784, 1001), (250, 501), (64, 577))
EQUAL_LAYERS = ((9, 64, 577), (9, 32, 289), (10, 16, 145))  # of a ResNet32: how many, d_out, d_in
CPU = torch.device("cpu")
UPDATES = (17, 145, 577, 1001, 2305, 4609)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few = slice(-1, None) if args.quick else slice(None)
    numbers: dict[str, list[list[float]]] = {
        "products": [[m, d, *product(m, d)] for m, d in PRODUCTS[few]],
        "equal layers": [[*shape, *equal_layers(*shape)] for shape in EQUAL_LAYERS[few]],
        "updates": [] if args.quick else updates(UPDATES),
    }
    options.finish(args, "tried", CPU, numbers, render)


def render(results: dict[str, Any]) -> str:
    """A table for each thing that was tried."""
    products = [["M H", "float32", "GFLOP/s", "bfloat16", "GFLOP/s", "into a buffer"]]
    for m, d, full, low, kept in results["products"]:
        work = 2e-6 * m * d * d
        numbers = f"{full:.2f}", f"{work / full:.0f}", f"{low:.2f}", f"{work / low:.0f}", f"{kept:.2f}"
        products.append([f"{m}×{d}", *numbers])
    layers = [["layers", "directions one by one", "batched", "updates one by one", "vectors together", "batched"]]
    for count, d_out, d_in, *times in results["equal layers"]:
        layers.append([f"{count} of {d_out}×{d_in}", *(f"{ms:.2f}" for ms in times)])
    compiled = [["BFGS update, d", "eager", "compiled", "five one by one", "five together"]]
    compiled += [[str(d), *(f"{ms:.2f}" for ms in times)] for d, *times in results["updates"]]
    return "\n\n".join(markdown(table) for table in (products, layers, compiled) if len(table) > 1)


def product(m: int, d: int) -> list[float]:
    """M H in float32 and bfloat16, and in bfloat16 into a kept buffer."""
    M, H = torch.randn(m, d), torch.randn(d, d)
    low, H_low, out = M.bfloat16(), H.bfloat16(), torch.empty(m, d, dtype=torch.bfloat16)
    runs = partial(torch.mm, M, H), partial(torch.mm, low, H_low), partial(torch.mm, low, H_low, out=out)
    return [milliseconds(run) for run in runs]


def equal_layers(count: int, d_out: int, d_in: int) -> list[float]:
    """Directions and updates of equal layers: one by one, in one batched call, and (updates) as it is done."""
    M, H = torch.randn(count, d_out, d_in), _inverse(d_in).repeat(count, 1, 1)
    s = torch.randn(count, d_in)
    runs: list[Callable[[], object]] = [
        lambda: [m @ h for m, h in zip(M, H, strict=True)],
        lambda: M @ H,
        lambda: [bfgs_update_(h, v, 0.7 * v) for h, v in zip(H, s, strict=True)],
        lambda: bfgs_update_each_(H.unbind(), s, 0.7 * s),
        lambda: bfgs_update_(H, s, 0.7 * s),
    ]
    return [milliseconds(run) for run in runs]


def updates(sizes: Sequence[int]) -> list[list[float]]:
    """Size, and the BFGS update, eager and compiled; and five of it, one by one and together."""
    fast, rows = torch.compile(bfgs_update_), []
    for d in sizes:
        H, s = _inverse(d), torch.randn(5, d)
        y = 0.7 * s
        runs: list[Callable[[], object]] = [
            partial(bfgs_update_, H, s[0], y[0]),
            partial(fast, H, s[0], y[0]),
            partial(_one_by_one, H, s, y),
            partial(bfgs_updates_each_, [H], s.unsqueeze(1), y.unsqueeze(1)),
        ]
        rows.append([d, *map(milliseconds, runs)])
    return rows


def _one_by_one(H: Tensor, s: Tensor, y: Tensor) -> None:
    for pair in zip(s, y, strict=True):
        bfgs_update_(H, *pair)


def _inverse(d: int) -> Tensor:
    return 2.0 * torch.eye(d)


def milliseconds(run: Callable[[], object], times: int = 15) -> float:
    """Time of a run, the median of some."""
    seconds = []
    for _ in range(times + 2):  # two to warm up
        start = now(CPU)
        run()
        seconds.append(now(CPU) - start)
    return 1e3 * statistics.median(seconds[2:])


if __name__ == "__main__":
    main()
