"""Says of every operation of a step what it is part of, by wrapping what the optimizers call."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch import nn

from kfqn_ext.extensions import LayerExtension
from kfqn_ext.optim import KroneckerOptimizer, Minibatch, optimizer
from kfqn_ext.optim.preconditioner.preconditioner import Preconditioner
from workloads.operations import Operations

PASSES, SECOND, MEASURING, LEARNING = "forward and backward pass", "second pass", "measuring", "learning"
DIRECTIONS, MOVES, REST = "directions", "momentum and moves", "rest"
PARTS = (PASSES, SECOND, MEASURING, LEARNING, DIRECTIONS, MOVES, REST)

Label = Callable[..., tuple[str, str]]
"""The arguments of a function ↦ the part that it is, and the layer."""


@contextmanager
def told_apart(operations: Operations, model: nn.Module) -> Iterator[None]:
    """Let operations that run in the body be counted by part, and where one layer alone has them, by layer."""
    names = {module: name for name, module in model.named_modules()}
    wrapped: list[tuple[Any, str, Label]] = [
        # A second pass runs the minibatch as the first does.
        (Minibatch, "__call__", lambda *_: (SECOND if operations.current[0] == SECOND else PASSES, "")),
        (KroneckerOptimizer, "_repeat", lambda *_: (SECOND, "")),
        (LayerExtension, "__call__", lambda _, module, *__: (MEASURING, names[module])),
        (Preconditioner, "learn", lambda *_: (LEARNING, "")),
        (Preconditioner, "update_inverses", lambda *_: (LEARNING, "")),
        (KroneckerOptimizer, "_direction", lambda _, layer, *__: (DIRECTIONS, layer.name)),
        (optimizer, "descend", lambda *_, **__: (MOVES, "")),
    ]
    with ExitStack() as stack:
        for owner, name, label in wrapped:
            stack.enter_context(patch.object(owner, name, _labelled(operations, getattr(owner, name), label)))
        yield


def _labelled(operations: Operations, function: Callable[..., Any], label: Label) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with operations.part(*label(*args)):
            return function(*args, **kwargs)

    return run
