"""Where the time of a step goes: ``python -m benchmarks.profile --problem vgg16 --method kbfgs``.

The parts of ``table_5``, as :mod:`workloads.bench` measures them, with two of them split further by clocks around
what the two inverses of a block do. On a GPU each clock waits for the device, so that parts add up to more than a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

from benchmarks import options
from benchmarks.problems import PROBLEMS, QUICK
from benchmarks.report import markdown, save
from benchmarks.turns import prepare
from kfqn_ext.optim.inverses import InputInverse, OutputInverse
from kfqn_ext.optim.inverses.base import Inverse
from workloads.bench import Bench
from workloads.clock import now
from workloads.cost_formulas import Frequencies
from workloads.lines import WIDTH
from workloads.methods import METHODS
from workloads.workload import Workload

# What a rule's method does, in words.
LEARN_A, LEARN_G, TIMES_A, TIMES_G = "update of H_A", "update of H_G", "product with H_A", "product with H_G"
_RANGES = {
    LEARN_A: (InputInverse, ("learn", "update_inverse")),
    LEARN_G: (OutputInverse, ("learn", "update_inverse")),
    TIMES_A: (InputInverse, ("precondition",)),
    TIMES_G: (OutputInverse, ("precondition",)),
}


class Ranges:
    """Seconds by range since the last ``clear``; a range inside another one belongs to the outer."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._inside = device, False
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds = dict.fromkeys(_RANGES, 0.0)

    @contextmanager
    def around_inverses(self) -> Iterator[None]:
        """Clocks around the methods of all rules, in the body."""
        with ExitStack() as stack:
            for name, (base, methods) in _RANGES.items():
                for rule in _with_subclasses(base):
                    for method in methods:
                        function = getattr(rule, method)  # its own, or inherited
                        # By the method of Inverse itself a recipe knows a rule that recomputes nothing.
                        if function is not getattr(Inverse, method, None):
                            stack.enter_context(patch.object(rule, method, self._timed(name, function)))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            start, self._inside = now(self._device), True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[name] += now(self._device) - start

        return run


def _with_subclasses(base: type) -> set[type]:
    return {base}.union(*(_with_subclasses(rule) for rule in base.__subclasses__()))


class Profile(Bench):
    """A bench that splits curvature and direction by inverse."""

    def __init__(self, workload: Workload, method: str, freq: Frequencies, device: torch.device) -> None:
        super().__init__(workload, method, freq, device)
        self.ranges = Ranges(device)

    def _two_passes(self, name: str, learn_every: int, invert_every: int) -> None:
        self.ranges.clear()
        with self.ranges.around_inverses():
            super()._two_passes(name, learn_every, invert_every)
        for part, seconds in self.ranges.seconds.items():
            self._note(name, part, seconds)

    def _by_part(self, t: dict[str, float]) -> dict[str, float]:
        parts = super()._by_part(t)
        if f"ordinary {TIMES_A}" not in t:
            return {"gradient": parts["gradient"], "rest of the step": parts["direction"]}
        learned = {name: self._learning(t, name) for name in (LEARN_A, LEARN_G)}
        products = {name: t[f"ordinary {name}"] for name in (TIMES_A, TIMES_G)}
        return {
            "gradient": parts["gradient"],
            "second pass": parts["additional pass"],
            "measuring both passes": max(0.0, parts["curvature"] - sum(learned.values())),
            **learned,
            **products,
            "rest of the step": max(0.0, parts["direction"] - sum(products.values())),
        }

    def _learning(self, t: dict[str, float], name: str) -> float:
        due = t[f"due {name}"]
        inverse = max(0.0, t[f"inverse {name}"] - due) if f"inverse {name}" in t else 0.0
        return due / (self._freq.T1 if self._is_kfac else self._freq.T) + inverse / self._freq.T


def draw(seconds: dict[str, float], title: str, path: Path) -> None:
    """A bar a part."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    bars = ax.barh(list(seconds)[::-1], [1e3 * s for s in seconds.values()][::-1])
    ax.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    ax.set(xlabel="ms a step", title=title)
    ax.margins(x=0.12)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__)
    options.add_outputs(parser, figure=True)
    parser.set_defaults(problem=["resnet32"])
    parser.add_argument("--method", choices=METHODS, default="kbfgs")
    parser.add_argument("--update-freq", type=int, default=1, help="T; T₂ for KFAC")
    parser.add_argument("--stats-update-freq", type=int, default=1, help="T₁ of KFAC")
    args = parser.parse_args(arguments)
    device = prepare(args.device)
    found: dict[str, dict[str, float]] = {}
    for problem in args.problem:
        workload = (QUICK if args.quick else PROBLEMS)[problem]
        freq = Frequencies(T=args.update_freq, T1=args.stats_update_freq)
        seconds = Profile(workload, args.method, freq, device).measure(args.turns, steps=0).seconds
        title = f"{METHODS[args.method].title}, {workload.name}"
        found[title] = seconds
        if args.figure is not None:
            draw(seconds, title, args.figure.with_stem(f"{args.figure.stem}-{problem}"))
    options.finish(args, "profile", device, {"seconds": found}, render)


def render(results: dict[str, Any]) -> str:
    """A table a network: milliseconds and shares of the parts."""
    tables = []
    for title, seconds in results["seconds"].items():
        total = sum(seconds.values())
        rows = [[part, f"{1e3 * s:.2f}", f"{100 * s / total:.1f}"] for part, s in seconds.items()]
        tables.append(markdown([[title, "ms", "%"], *rows]))
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
