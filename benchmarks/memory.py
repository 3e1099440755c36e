"""Peak memory and state of each contender, in a fresh process, so that nobody inherits what others have touched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from benchmarks.turns import first_line, prepare


@dataclass(frozen=True)
class Memory:
    """What an optimizer takes.

    Attributes:
        peak: Bytes above those of the process with network and minibatch, in the step that does the most and the
            first one; None where the system does not say.
        state: Bytes of all tensors that the optimizer holds between steps.
    """

    peak: int | None
    state: int


def measure(contender: str, problem: str, quick: bool, device: str) -> Memory | str:
    """Measure in a process of its own; what went wrong where that fails."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports once, forks for each contender
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, contender, problem, quick, device), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:  # for example for want of memory
        return "its process was killed"
    finally:
        process.join()


def _send(sender: Connection, *args: Any) -> None:
    try:
        sender.send(_measure_here(*args))
    except Exception as error:
        sender.send(first_line(error))


def _measure_here(contender: str, problem: str, quick: bool, device_name: str) -> Memory:
    device, package = prepare(device_name), CONTENDERS[contender].package
    if package is not None:
        import_module(package)  # before the peak starts: code is not what an optimizer takes
    setup = set_up((QUICK if quick else PROBLEMS)[problem], device)
    peak = peak_of(device)
    ready = CONTENDERS[contender].build(setup)
    list(ready.steps.values())[-1]()
    return Memory(peak(), held_bytes(ready.holds, setup))


def peak_of(device: torch.device) -> Callable[[], int | None]:
    """Start again to look for the peak; what is returned tells how many bytes it was above what is held now."""
    return _peak_on_gpu(device) if device.type == "cuda" else _peak_of_process()


def _peak_on_gpu(device: torch.device) -> Callable[[], int]:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device) - before


def _peak_of_process() -> Callable[[], int | None]:
    # Not getrusage's ru_maxrss: it starts at what the parent process had.
    status = Path("/proc/self/status")
    if not status.exists():
        return lambda: None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _line(status, "VmRSS")
    return lambda: _line(status, "VmHWM") - before


def _line(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def held_bytes(holds: Any, setup: Setup) -> int:
    """Bytes of :func:`held_tensors`; those that share memory count once."""
    return sum({_storage(t): t.untyped_storage().nbytes() for t in held_tensors(holds, setup)}.values())


def held_tensors(holds: Any, setup: Setup) -> list[Tensor]:
    """The tensors that can be reached from an object and are not the network's or the minibatch's.

    Args:
        holds: An optimizer, or whatever stands for it.
        setup: Whose parameters, buffers, gradients and data do not count.

    Returns:
        These.
    """
    own = [*setup.model.parameters(), *setup.model.buffers(), setup.x, setup.y]
    own += [p.grad for p in setup.model.parameters() if p.grad is not None]
    known = {_storage(tensor) for tensor in own}
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [holds]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor) and _storage(thing) not in known:
            found.append(thing)
        waiting += _inside(thing)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, (type, ModuleType, str)) or (callable(thing) and not isinstance(thing, torch.nn.Module)):
        return [*thing.args, *thing.keywords.values()] if isinstance(thing, partial) else []
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)
    return list(vars(thing).values()) if hasattr(thing, "__dict__") else []
