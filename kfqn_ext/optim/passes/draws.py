"""Whether two passes draw the same random numbers: torch's generators are the process's, and other threads draw too."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_dropout

_Call = tuple[nn.Module, int, int]
# Passes that are in a call of a module which draws, by the device whose generator it draws from.
_drawing: defaultdict[int | None, set["Draws"]] = defaultdict(set)


class Draws:
    """Where the generators stood in one pass, before and after each call of a module which draws.

    Two calls at the same time leave a generator where one after the other would, and may have each other's numbers.
    Such passes agree with none. Draws of functions, as ``F.dropout``, can't be told from those of another thread and
    are not watched: a model that draws nothing may learn beside one that draws all the time.
    """

    def __init__(self) -> None:
        """Know of no draw yet."""
        self._before: dict[nn.Module, int] = {}
        self._seen: list[_Call] = []
        self._overlapped = False

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Take note while the body runs a model."""
        drawing = [module for module in model.modules() if draws(module)]
        hooks = [module.register_forward_pre_hook(self._enter) for module in drawing]
        hooks += [module.register_forward_hook(self._leave, prepend=True) for module in drawing]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for passes in _drawing.values():
                passes.discard(self)  # a call that has raised was never left

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            at_once = _drawing[_generator_of(args)]
            at_once.add(self)
            if len(at_once) > 1:
                for one in list(at_once):
                    one._overlapped = True
            self._before[module] = _position(args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._seen.append((module, self._before[module], _position(args)))
            _drawing[_generator_of(args)].discard(self)

    def agree_with(self, other: "Draws") -> bool:
        """Whether the draws of one pass are among those of the other, in their order.

        One of the two may have had calls beside those that count, as for a log; a checkpoint may repeat fewer.
        """
        if self._overlapped or other._overlapped:
            return False
        return _is_within(self._seen, other._seen) or _is_within(other._seen, self._seen)


def _is_within(some: Sequence[_Call], calls: Sequence[_Call]) -> bool:
    """Whether a sequence is what is left of another where some are struck out."""
    rest = iter(calls)
    return all(call in rest for call in some)


def draws(module: nn.Module) -> bool:
    """Whether a module is known to draw random numbers in the mode it is in."""
    if is_dropout(module):
        return module.training and module.p > 0
    rate: Any = getattr(module, "dropout", 0.0)  # as attention and recurrent layers call it
    named = any(word in type(module).__name__.lower() for word in ("drop", "noise", "stochastic"))
    drops = isinstance(rate, float | int) and rate > 0
    return module.training and (named or drops or isinstance(module, nn.RReLU))


def _generator_of(args: Any) -> int | None:
    """The number of the CUDA device of a module's input; None for the CPU."""
    device = next((value.device for value in args if isinstance(value, Tensor)), None)
    return device.index if device is not None and device.type == "cuda" else None


def _position(args: Any) -> int:
    """Where the generator stands on the device of a module's input."""
    return hash(generator_state(_generator_of(args)).numpy().tobytes())


def generator_state(device: int | None) -> Tensor:
    """The state of the generator of a CUDA device, or of the CPU's: a tensor on the host."""
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)
