"""A contender that has taken its first step, so that all its state is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.clock import Run

# Curvature of random data says nothing, so these only have to keep the loss finite.
LR, DAMPING = 1e-6, 1.0


@dataclass(frozen=True)
class Ready:
    """Steps to take.

    Attributes:
        steps: A whole step by kind, from forward pass to new parameters; the last kind does the most.
        holds: What the optimizer's tensors are found in.
    """

    steps: Mapping[str, Run]
    holds: Any
