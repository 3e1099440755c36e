"""A warning about something the device knows, given without waiting for the device."""

from typing import Any
from warnings import warn

import torch
from torch import Tensor


class LateWarning:
    """Warns once, when a flag that was noted earlier turns out to be true.

    On a GPU the flag travels while the host goes on, and is read once it has arrived: a step or two late.
    """

    def __init__(self, message: str) -> None:
        """Prepare to warn with a message."""
        self._message = message
        self._pending: list[tuple[Tensor, Any]] = []
        self._given = False

    def note(self, flag: Tensor) -> None:
        """Note a flag, bool []; warn if an earlier one, or on a CPU this one, is true."""
        if self._given:
            return
        if not flag.is_cuda:
            self._read(flag)
            return
        if torch.cuda.is_current_stream_capturing():  # a graph replays no Python
            return
        host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(flag.device))
        self._pending.append((host, event))
        while self._pending and self._pending[0][1].query():
            self._read(self._pending.pop(0)[0])

    def _read(self, flag: Tensor) -> None:
        if bool(flag) and not self._given:
            self._given = True
            self._pending = []
            warn(self._message, stacklevel=2)
