"""How the parts of a K-BFGS step grow with batch, width, locations and layers: ``python -m benchmarks.scaling``.

A stack of equal 3×3 convolutions, one size varied at a time. Exponents are slopes of log time against log size over the
upper half of the sizes, which the table names, beside the slopes of ``table_5``'s multiplications over the same half:
fixed costs of a call flatten the measured ones, and so does a product that reaches the processor's speed at large sizes
only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import NullLocator
from torch import nn
from tqdm import tqdm

from benchmarks import options
from benchmarks.report import markdown, save
from benchmarks.turns import prepare
from workloads.bench import Bench
from workloads.cost_formulas import Frequencies, multiplications
from workloads.layer_sizes import layer_sizes
from workloads.lines import WIDTH, log_axis, look
from workloads.losses import CROSS_ENTROPY
from workloads.workload import Workload

PARTS = ("gradient", "additional pass", "curvature", "direction")
_EVERY_STEP = Frequencies(T=1)


@dataclass(frozen=True)
class Stack:
    """Equal convolutions.

    Attributes:
        batch: m.
        width: I = J, channels.
        side: Pixels of a side; |T| is its square.
        layers: How many convolutions.
    """

    batch: int = 32
    width: int = 32
    side: int = 8
    layers: int = 2

    def workload(self) -> Workload:
        return Workload("stack", self._build, CROSS_ENTROPY, (self.width, self.side, self.side), 10, self.batch)

    def _build(self) -> nn.Sequential:
        blocks = [m for _ in range(self.layers) for m in (nn.Conv2d(self.width, self.width, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.width, 10))


BASE = Stack()
SWEEPS = {
    "batch": [replace(BASE, batch=n) for n in (32, 64, 128, 256)],
    "width": [replace(BASE, width=n) for n in (32, 64, 128, 256)],
    "locations": [replace(BASE, side=n) for n in (8, 16, 32)],
    "layers": [replace(BASE, layers=n) for n in (2, 4, 8, 16)],
}
QUICK_SWEEPS = {name: [replace(s, batch=s.batch // 8, width=s.width // 4) for s in v[:2]] for name, v in SWEEPS.items()}


def size(name: str, stack: Stack) -> int:
    """What a sweep varies."""
    return stack.side**2 if name == "locations" else getattr(stack, name)


def upper_half(values: Sequence[float]) -> Sequence[float]:
    """What exponents are fitted to, two values at least."""
    return values[-max(2, math.ceil(len(values) / 2)) :]


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of log y against log x over the upper half of the points."""
    points = [(math.log(x), math.log(y)) for x, y in zip(upper_half(xs), upper_half(ys), strict=True) if y > 0]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def measure(sweep: Sequence[Stack], name: str, repeats: int, device: torch.device) -> dict[str, Any]:
    """One sweep: sizes, and by part seconds, multiplications, and the slopes of both."""
    seconds, formula = [], []
    for stack in sweep:
        workload = stack.workload()
        bench = Bench(workload, "kbfgs", _EVERY_STEP, device)
        seconds.append(bench.measure(repeats, steps=0).seconds)
        layers = layer_sizes(bench.model, workload.data(device)[0][:2])
        formula.append(multiplications("kbfgs", layers, stack.batch, _EVERY_STEP))
    sizes = [size(name, stack) for stack in sweep]
    parts = {
        part: {
            "seconds": [s[part] for s in seconds],
            "exponent": slope(sizes, [s[part] for s in seconds]),
            "table_5": slope(sizes, [f[part] for f in formula]),
        }
        for part in PARTS
    }
    return {"sizes": sizes, "parts": parts}


def render(results: dict[str, Any]) -> str:
    """Exponents, measured and of ``table_5``, each row with the sizes that they are fitted to."""
    rows = [["size", *PARTS]]
    for name, sweep in results["sweeps"].items():
        fitted = upper_half(sweep["sizes"])
        cells = [f"{p['exponent']:.2f} ({p['table_5']:.2f})" for p in (sweep["parts"][part] for part in PARTS)]
        rows.append([f"{name} {fitted[0]} to {fitted[-1]}", *cells])
    return "Exponents, measured (`table_5`):\n\n" + markdown(rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel a size; the exponents are in the table."""
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.2), layout="constrained")
    for ax, (name, sweep) in zip(axes.flat, results["sweeps"].items(), strict=True):
        for number, (part, values) in enumerate(sweep["parts"].items()):
            ax.plot(sweep["sizes"], [1e3 * s for s in values["seconds"]], label=part, **look(number))
        log_axis(ax)
        ax.set_xscale("log")
        ax.set_xticks(sweep["sizes"], [f"{n:g}" for n in sweep["sizes"]], fontsize=8)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel(name, fontsize=9)
        ax.set_ylabel("ms a step", fontsize=9)
    names = axes[0, 0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(PARTS), fontsize=9, frameon=False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, problems=False)
    options.add_outputs(parser, figure=True)
    args = parser.parse_args(arguments)
    device = prepare(args.device)
    chosen = QUICK_SWEEPS if args.quick else SWEEPS
    sweeps = {name: measure(sweep, name, args.turns, device) for name, sweep in tqdm(chosen.items(), leave=False)}
    if args.figure is not None:
        draw({"sweeps": sweeps}, args.figure)
    options.finish(args, "scaling", device, {"sweeps": sweeps}, render)


if __name__ == "__main__":
    main()
