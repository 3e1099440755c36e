"""Kronecker-factored quasi-Newton methods: their quantities from BackPACK, and optimizers that train with them."""

from kfqn_ext.extensions import InputGram, KBFGSQuantities, KFACFactors, extend, unextend
from kfqn_ext.optim import KBFGS, KBFGS20, KBFGSL, KBFGSL20, KFAC, Minibatch, OnePassKBFGS, ProvableKBFGSL

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
    "ProvableKBFGSL",
    "extend",
    "unextend",
]
