"""A contender that has taken its first step, so that all its state is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.turns import Run


@dataclass(frozen=True)
class Ready:
    """Steps to take.

    Attributes:
        steps: A whole step by kind, from forward pass to new parameters; the last kind does the most.
        holds: What the optimizer's tensors are found in.
    """

    steps: Mapping[str, Run]
    holds: Any
