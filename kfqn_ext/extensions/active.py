"""What the backward passes that a thread starts are to measure, beside the extensions of ``backpack(...)``.

Those are active in all threads of the process: of two models that train in two threads, each would meet the other's.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from backpack.context import CTX
from torch import Tensor, nn

from kfqn_ext._torch import of_thread, set_of_thread

_KEY = "kfqn_ext.extensions.active"
BACKPACKS = "_backpack_extend"  # what BackPACK marks modules with
Reader = Callable[[nn.Module, Tensor | None], None]
"""Takes note of a layer's call and of its input, in the forward pass; of no input where a transformation hides it."""


@dataclass(frozen=True)
class Reached:
    """Layers that are to have an output gradient, whatever needs one.

    Attributes:
        layers: These.
        zeros: What was added to outputs so far, with a gradient of their own: a pass adds to it where it would add to
            those of parameters that are frozen.
        entries: The layers whose outputs get one in every call: a graph begins with one of them.
    """

    layers: frozenset[nn.Module] = frozenset()
    zeros: list[Tensor] = field(default_factory=list)
    entries: set[nn.Module] = field(default_factory=set)

    def zero_for(self, module: nn.Module, output: Tensor) -> Tensor | None:
        """What to add to the output of a call; None where that needs nothing."""
        begins = not self.entries or module in self.entries
        if module not in self.layers or (output.requires_grad and not begins):
            return None
        self.entries.add(module)
        self.zeros.append(torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True))
        return self.zeros[-1]


@dataclass(frozen=True)
class Active:
    """What holds in a thread; contexts in contexts add to it.

    Attributes:
        extensions: What measures.
        waiting: Extensions of ``backpack(...)`` that are to wait; None where none has to, be there some or not.
        reached: Layers that are to have an output gradient.
        readers: What is shown every call of a layer.
    """

    extensions: tuple[Any, ...] = ()
    waiting: tuple[Any, ...] | None = None
    reached: Reached = Reached()
    readers: tuple[Reader, ...] = ()

    def of(self, module: nn.Module) -> list[Any]:
        """The extensions that are to run for a layer from the hooks of this package."""
        return [*self._backpacks(module), *self.extensions]

    def runs_backpacks(self, module: nn.Module) -> bool:
        """Whether those of ``backpack(...)`` may be among them: a hook of BackPACK's own runs them itself."""
        return bool(self._backpacks(module)) or (self.waiting is None and not has_backpacks_hooks(module))

    def _backpacks(self, module: nn.Module) -> list[Any]:
        waiting = self.waiting or ()
        found = () if has_backpacks_hooks(module) else CTX.get_active_exts()
        return [ext for ext in found if not any(ext is other for other in waiting)]


def has_backpacks_hooks(module: nn.Module) -> bool:
    """Whether ``backpack.extend`` was called on a module, whose own hooks then run the extensions.

    Args:
        module: The module; those within it don't count.
    """
    return bool(module.__dict__.get(BACKPACKS, False))


_NOTHING = Active()


def active() -> Active:
    """What holds now, in the thread that has started the backward pass that runs."""
    return of_thread(_KEY, _NOTHING)


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
        alone: Whether others that are active now wait until the body has ended, those of ``backpack(...)`` too, but for
            others in a context of this kind.

    Yields:
        Nothing.
    """
    now = active()
    waiting = tuple(CTX.get_active_exts()) if alone else now.waiting
    others = () if alone and now.waiting is None else now.extensions
    with _holding(replace(now, extensions=(*others, *extensions), waiting=waiting)):
        yield


@contextmanager
def read_inputs(reader: Reader) -> Iterator[None]:
    """Show a function every call of an extended layer in the body, measured or not.

    Args:
        reader: f(module, input), called in the forward pass; the input is None where a transformation hides it.

    Yields:
        Nothing.
    """
    now = active()
    with _holding(replace(now, readers=(*now.readers, reader))):
        yield


@contextmanager
def reaching(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Give layers an output gradient in the passes of the body, whatever needs one."""
    now = active()
    with _holding(replace(now, reached=Reached(now.reached.layers.union(layers)))):
        yield
