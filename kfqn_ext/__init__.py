"""Kronecker-factored quasi-Newton methods: their quantities from BackPACK, and optimizers that train with them."""

from importlib import import_module
from typing import Any

from kfqn_ext.extensions import InputGram, KBFGSQuantities, KFACFactors, extend, unextend
from kfqn_ext.optim import (
    KBFGS,
    KBFGS20,
    KBFGSL,
    KBFGSL20,
    KFAC,
    Minibatch,
    OnePassKBFGS,
    OnePassKFAC,
    ProvableKBFGSL,
)

__version__ = "0.1.0"
__all__ = [
    "KBFGS",
    "KBFGS20",
    "KBFGSL",
    "KBFGSL20",
    "KFAC",
    "InputGram",
    "KBFGSQuantities",
    "KFACFactors",
    "Minibatch",
    "OnePassKBFGS",
    "OnePassKFAC",
    "ProvableKBFGSL",
    "extend",
    "unextend",
]


def __getattr__(name: str) -> Any:
    """Import ``kfqn_ext.curvature``, which not everybody needs, when it is first named."""
    if name == "curvature":
        return import_module("kfqn_ext.curvature")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what can be named."""
    return [*globals(), "curvature"]
