"""Which call of a layer an extension is called for, and in which backward pass."""

from typing import Any

from torch import nn

from kfqn_ext._torch import current_backward

CALL = "_kfqn_call"


class Call:
    """One call of a layer, alive as long as its graph: tells a second pass through it from another call."""

    def __init__(self) -> None:
        """Remember the backward pass that the forward pass runs in, as in a reentrant checkpoint; -1 for none."""
        self.within: int = current_backward()


def call_of(module: nn.Module) -> tuple[Any, int]:
    """The call that a layer's gradient has arrived for, as an object, and the number of the backward pass.

    Calls inside reentrant checkpoints have backward passes of their own, and count for the one around them.
    """
    call = module.__dict__.get(CALL)
    backward = current_backward()
    if call is None:  # BackPACK's own hooks, which keep the output of each call
        return module.output, backward
    return call, backward if call.within < 0 else call.within
