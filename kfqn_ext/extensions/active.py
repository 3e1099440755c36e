"""What the backward passes that a thread starts are to measure, beside the extensions of ``backpack(...)``.

Those are active in all threads of the process: of two models that train in two threads, each would meet the other's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from backpack.context import CTX
from torch import nn

from kfqn_ext._torch import of_thread, set_of_thread

_KEY = "kfqn_ext.extensions.active"


@dataclass(frozen=True)
class Active:
    """What holds in a thread; contexts in contexts add to it.

    Attributes:
        extensions: What measures.
        alone: Whether extensions of ``backpack(...)`` are to wait.
        reached: Layers that are to have an output gradient whatever needs one.
    """

    extensions: tuple[Any, ...] = ()
    alone: bool = False
    reached: frozenset[nn.Module] = frozenset()

    def of(self, module: nn.Module) -> list[Any]:
        """The extensions that are to run for a layer from the hooks of this package."""
        return [*(CTX.get_active_exts() if self.runs_backpacks(module) else ()), *self.extensions]

    def runs_backpacks(self, module: nn.Module) -> bool:
        """Whether those of ``backpack(...)`` are among them: a hook of BackPACK's own runs them itself."""
        return not self.alone and not module.__dict__.get("_backpack_extend", False)


def active() -> Active:
    """What holds now, in the thread that has started the backward pass that runs."""
    return of_thread(_KEY, Active())


@contextmanager
def _holding(now: Active) -> Iterator[None]:
    before = active()
    set_of_thread(_KEY, now)
    try:
        yield
    finally:
        set_of_thread(_KEY, before)


@contextmanager
def measuring(extensions: Iterable[Any], alone: bool = False) -> Iterator[None]:
    """Run extensions in the backward passes that this thread starts in the body, and in no other's.

    Args:
        extensions: They join those that are active already.
        alone: Whether those of ``backpack(...)`` wait until the body has ended.

    Yields:
        Nothing.
    """
    now = active()
    with _holding(replace(now, extensions=(*now.extensions, *extensions), alone=now.alone or alone)):
        yield


@contextmanager
def reaching(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers an output gradient in the passes of the body, whatever needs one."""
    now = active()
    with _holding(replace(now, reached=now.reached.union(layers))):
        yield
