"""Kronecker-factored quasi-Newton methods: their quantities from BackPACK, and optimizers that train with them."""

from kfqn_ext.extensions import KBFGSQuantities, extend, unextend
from kfqn_ext.optim import KBFGS, KBFGSL, Minibatch

__version__ = "0.1.0"
__all__ = ["KBFGS", "KBFGSL", "KBFGSQuantities", "Minibatch", "extend", "unextend"]
