"""How often a step makes the host wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import steps
from benchmarks.gpu.place import Place

_OURS = ("onepass", "onepass-bf16", "untuned", "kbfgs", "kbfgs-bf16")
# What torch says in this mode; and what reads numbers from a tensor, which on a CPU stands for it.
_MESSAGE = "synchroniz"
_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}


def measure(place: Place) -> dict[str, Any]:
    """By problem and step: how often it waited, once its state is there."""
    found: dict[str, dict[str, int]] = {}
    for problem in place.problems:
        found[problem] = {}
        for name, _, ready in steps.each(place, problem):
            for kind in steps.kinds(ready):
                with counted(place) as waits:
                    ready.steps[kind]()
                title = steps.title(name, kind, ready)
                found[problem][title] = len(waits)
                if waits and place.is_gpu and name in _OURS:
                    where = "\n".join(dict.fromkeys(waits))
                    place.failures.append(f"{problem}, {title} waits {len(waits)} times:\n{where}")
    return found


@contextmanager
def counted(place: Place) -> Iterator[list[str]]:
    """Where the host waited in the body; the list fills when that ends."""
    found: list[str] = []
    if not place.is_gpu:
        with _Reads(found):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if _MESSAGE in str(w.message)]


class _Reads(TorchDispatchMode):
    """Collects reads of numbers, except of counts, which live on the host whatever the device."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS and args[0].is_floating_point():
            self._found.append(name)
        return func(*args, **(kwargs or {}))


def render(found: dict[str, Any]) -> str:
    return steps.table("waits of a step", found, str)
