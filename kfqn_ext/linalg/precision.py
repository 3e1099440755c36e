"""float32 products in float32, whatever torch may make of a network's.

``torch.set_float32_matmul_precision("high")`` lets products of float32 matrices run in TF32, "medium" in bfloat16, and
convolutions on GPUs run in TF32 unless they are told not to; ``torch.autocast`` rounds them too. A network trains as
well. But a BFGS update whose product H y is rounded to 8 or 11 bits makes H indefinite, a rounded Gram matrix is no
longer semidefinite, and Δh̄ is a small difference of large numbers.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import backends

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
# A switch for each kind of operation came with torch 2.9.
_ONE_A_KIND = hasattr(backends.cuda.matmul, "fp32_precision")


class _Thread(threading.local):
    """Whether a thread is in the body of :func:`full_precision`: to ask again costs as much as a small product."""

    inside = False


_THREAD = _Thread()


class _Process:
    """torch's switches, which are the process's: the first thread in the body sets them, the last one resets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._reduced: list[tuple[Any, str]] = []

    def enter(self) -> None:
        """Set the switches, where no thread has."""
        with self._lock:
            if self._threads == 0:
                found = [switch for switch in _switches() if switch.fp32_precision not in ("ieee", "none")]
                self._reduced = [(switch, _held(switch)) for switch in found]
                for switch in found:
                    switch.fp32_precision = "ieee"
            self._threads += 1

    def leave(self) -> None:
        """Set them back, where no other thread is left."""
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                for switch, value in self._reduced:
                    switch.fp32_precision = value


_PROCESS = _Process()


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 in float32: in the body, or in the function that is decorated.

    torch's switches are the process's: while the body runs, other threads' products are in full precision too.
    ``torch.autocast`` is this thread's alone.
    """
    if _THREAD.inside:
        yield
        return
    _PROCESS.enter()
    try:
        _THREAD.inside = True
        with without_autocast():
            yield
    finally:
        _THREAD.inside = False
        _PROCESS.leave()


def _held(switch: Any) -> str:
    """What a switch holds itself: "none" where it only follows a more general one, as it shall do afterwards too."""
    value: str = switch.fp32_precision
    switch.fp32_precision = "none"
    return "none" if switch.fp32_precision == value else value


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off where it is on: torch's context costs more than to ask."""
    with ExitStack() as stack:
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _switches() -> tuple[Any, ...]:
    """What has an attribute ``fp32_precision``: one a device and kind of operation."""
    if _ONE_A_KIND:
        b: Any = backends
        return b.cuda.matmul, b.cudnn.conv, b.mkldnn.matmul, b.mkldnn.conv
    return _Products(), _Convolutions()


class _Products:
    """The switch of torch before 2.9, for all devices."""

    @property
    def fp32_precision(self) -> str:
        precision = torch.get_float32_matmul_precision()
        return "ieee" if precision == "highest" else precision

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision("highest" if value in ("ieee", "none") else value)


class _Convolutions:
    """The switch of torch before 2.9, for GPUs."""

    @property
    def fp32_precision(self) -> str:
        return "tf32" if backends.cudnn.allow_tf32 else "ieee"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        backends.cudnn.allow_tf32 = value == "tf32"
