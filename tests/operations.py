"""Counts what torch is asked to do: on a GPU the number of kernels, more than their work, takes the time."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What runs no kernel: views, and numbers that stay on the host.
FREE = {"alias", "detach", "expand", "permute", "promote_types", "scalar_tensor", "select", "slice", "split", "squeeze"}
FREE |= {"t", "transpose", "unfold", "unsqueeze", "view", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> int:
        return sum(count for name, count in self.seen.items() if name not in FREE and "record_function" not in name)
