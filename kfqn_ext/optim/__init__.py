"""Optimizers of the K-BFGS family, as ``torch.optim.Optimizer`` subclasses."""

from kfqn_ext.optim.base import KroneckerOptimizer
from kfqn_ext.optim.kbfgs import KBFGS, KBFGSL
from kfqn_ext.optim.objective import Minibatch
from kfqn_ext.optim.recipe import Recipe

__all__ = ["KBFGS", "KBFGSL", "KroneckerOptimizer", "Minibatch", "Recipe"]
