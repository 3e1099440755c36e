"""Counts what torch is asked to do: on a GPU the number of kernels, more than their work, takes the time."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# What runs no kernel: views, new tensors without numbers, and numbers that stay on the host.
FREE = {"alias", "detach", "expand", "permute", "promote_types", "scalar_tensor", "select", "slice", "split", "squeeze"}
FREE |= {"t", "transpose", "unfold", "unsqueeze", "view", "_unsafe_view", "unbind", "diagonal", "as_strided"}
FREE |= {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
Part = tuple[str, str]
"""What an operation is part of, and of which layer; "" for none."""


@dataclass
class Load:
    """What some operations do.

    Attributes:
        launches: How many they are.
        bytes: Of all tensors that they read and write, each time.
        flops: Of their matrix products and convolutions, two a multiplication.
    """

    launches: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops)


class Operations(TorchDispatchMode):
    """Counts operations, by name, and their load by what :meth:`part` says that they are part of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.load: dict[Part, Load] = {}
        self.current: Part = ("rest", "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        if is_launched(name):
            flops = flop_registry.get(func.overloadpacket)
            done = 0 if flops is None else flops(*args, **(kwargs or {}), out_val=result)
            before = self.load.get(self.current, Load())
            self.load[self.current] = before + Load(1, _bytes((args, kwargs, result)), done)
        return result

    @property
    def number(self) -> int:
        return sum(count for name, count in self.seen.items() if is_launched(name))

    @contextmanager
    def part(self, name: str, layer: str = "") -> Iterator[None]:
        """What runs in the body is part of this; the inner one of two counts."""
        before, self.current = self.current, (name, layer)
        try:
            yield
        finally:
            self.current = before


def is_launched(name: str) -> bool:
    """Whether an operation runs a kernel."""
    return name not in FREE and "record_function" not in name


def _bytes(things: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(things) if isinstance(t, Tensor))
