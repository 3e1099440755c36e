"""Optimizers of the K-BFGS family, as ``torch.optim.Optimizer`` subclasses."""

from kfqn_ext.linalg import splits
from kfqn_ext.optim.groups.schedules import burn_in, dense_then, running_mean
from kfqn_ext.optim.kbfgs import KBFGS, KBFGSL
from kfqn_ext.optim.kbfgs20 import KBFGS20, KBFGSL20
from kfqn_ext.optim.kfac import KFAC
from kfqn_ext.optim.minibatch import Minibatch
from kfqn_ext.optim.one_pass import OnePassKBFGS
from kfqn_ext.optim.one_pass_kfac import OnePassKFAC
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.provable import ProvableKBFGSL, kappa_bounds, theorem_step_sizes
from kfqn_ext.optim.recipe import Recipe, SecondPass

__all__ = [
    "KBFGS",
    "KBFGS20",
    "KBFGSL",
    "KBFGSL20",
    "KFAC",
    "KroneckerOptimizer",
    "Minibatch",
    "OnePassKBFGS",
    "OnePassKFAC",
    "ProvableKBFGSL",
    "Recipe",
    "SecondPass",
    "burn_in",
    "dense_then",
    "kappa_bounds",
    "running_mean",
    "splits",
    "theorem_step_sizes",
]
