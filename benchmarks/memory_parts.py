"""What the peak of a step's memory is made of: ``python -m benchmarks.memory_parts --problem vgg16``.

Bytes of the tensors that live at once, in the first step and in one that does the most. Neither the allocator nor what
else runs is in them, so that two runs say the same. What an operation needs inside is not seen.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import options
from benchmarks.contenders import CONTENDERS
from benchmarks.memory import held_bytes, held_tensors
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from benchmarks.report import MB, markdown
from benchmarks.run import BASE
from benchmarks.turns import prepare

STATE, GRADIENTS, NETWORK, MEASURED, STEP = "state", "gradients", "activations", "measured", "step and learning"
PARTS = (STATE, GRADIENTS, NETWORK, MEASURED, STEP)
_MEASURING = ("/kfqn_ext/extensions/", "/kfqn_ext/geometry/")
_STEPPING = ("/kfqn_ext/optim/", "/kfqn_ext/linalg/", "/torch/optim/")
# They run the network, and what is made in them belongs to it.
_RUNNING = ("/kfqn_ext/optim/minibatch.py", "/kfqn_ext/extensions/hooks.py", "/kfqn_ext/extensions/calls.py")


class Live(TorchDispatchMode):
    """Follows the memory of tensors that are made in its body.

    Attributes:
        peak: The most bytes that lived at once.
        at_peak: Those, by number: their bytes, and the part that made them.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Leave out the memory of ``known``."""
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._count = count()
        self._numbers: dict[int, int] = {}  # of memory that lives: addresses come again
        self._live: dict[int, tuple[int, str]] = {}
        self._now, self.peak, self.at_peak = 0, 0, dict(self._live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        return made

    def begin(self) -> None:
        """Look for a peak from now on."""
        self.peak, self.at_peak = self._now, dict(self._live)

    def number(self, memory: torch.UntypedStorage) -> int | None:
        """Of memory that lives and was made in the body."""
        return self._numbers.get(memory._cdata)

    def _note(self, memory: torch.UntypedStorage) -> None:
        key = memory._cdata
        if key in self._numbers or key in self._known:
            return
        self._numbers[key] = number = next(self._count)
        self._live[number] = memory.nbytes(), _part()
        self._now += memory.nbytes()
        weakref.finalize(memory, self._forget, key)
        if self._now > self.peak:
            self.begin()

    def _forget(self, key: int) -> None:
        self._now -= self._live.pop(self._numbers.pop(key))[0]


def _part() -> str:
    """Who is making a tensor, by the innermost file of a package that tells."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _RUNNING):
            return NETWORK
        if any(part in name for part in _MEASURING):
            return MEASURED
        if any(part in name for part in _STEPPING):
            return STEP
        frame = frame.f_back
    return NETWORK


def parts(contender: str, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes by part at the peak of a contender's first step, and of the one that does the most; and of its state."""
    model, found = setup.model, {}
    with Live([*model.parameters(), *model.buffers(), setup.x, setup.y]) as live:
        ready = CONTENDERS[contender].build(setup)
        found["first step"] = _by_part(live, ready.holds, setup)
        live.begin()
        list(ready.steps.values())[-1]()
        found["later"] = _by_part(live, ready.holds, setup)
    return found | {"held": {STATE: held_bytes(ready.holds, setup)}}


def _by_part(live: Live, holds: Any, setup: Setup) -> dict[str, float]:
    state = {live.number(t.untyped_storage()) for t in held_tensors(holds, setup)}
    gradients = {live.number(p.grad.untyped_storage()) for p in setup.model.parameters() if p.grad is not None}
    found: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for number, (size, part) in live.at_peak.items():
        found[STATE if number in state else GRADIENTS if number in gradients else part] += size
    return dict(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__)
    options.add_outputs(parser)
    ours = [name for name in CONTENDERS if CONTENDERS[name].package is None]
    parser.add_argument("--contenders", nargs="+", choices=ours, default=ours, help="which ones")
    args = parser.parse_args(arguments)
    device = prepare(args.device)
    problems = QUICK if args.quick else PROBLEMS
    found = {
        problem: {
            name: parts(name, set_up(problems[problem], device)) for name in dict.fromkeys([BASE, *args.contenders])
        }
        for problem in args.problem
    }
    options.finish(args, "memory_parts", device, {"bytes": found}, render)


def render(results: dict[str, Any]) -> str:
    """A table a network: the larger of both peaks in MB, and beside state and SGD-m's peak."""
    return "\n\n".join(_table(problem, found) for problem, found in results["bytes"].items())


def _table(problem: str, found: dict[str, Any]) -> str:
    base, rows = sum(_largest(found[BASE])[1].values()), []
    for name, measured in found.items():
        when, by_part = _largest(measured)
        peak, state = sum(by_part.values()), measured["held"][STATE]
        row = [next(iter(CONTENDERS[name].rows)), when, f"{peak / MB:.0f}"]
        share = "" if name == BASE else f"{peak / (state + base):.2f}"
        rows.append([*row, *(f"{by_part[part] / MB:.0f}" for part in PARTS), f"{state / MB:.0f}", share])
    head = [problem, "peak in", "peak, MB", *PARTS, "state after", "peak ÷ (state + SGD-m's peak)"]
    return markdown([head, *rows])


def _largest(measured: dict[str, dict[str, float]]) -> tuple[str, dict[str, float]]:
    return max(((when, measured[when]) for when in ("first step", "later")), key=lambda one: sum(one[1].values()))


if __name__ == "__main__":
    main()
