"""How one Kronecker inverse is learned: the columns of the table that is the optimizer package."""

from kfqn_ext.optim.inverses.base import InputInverse, Inverse, Measured, OutputInverse, Seen, State
from kfqn_ext.optim.inverses.direct import BatchInverse, FisherInverse, GammaInverse, MovingInverse, OmegaInverse
from kfqn_ext.optim.inverses.fisher_action import FisherAction
from kfqn_ext.optim.inverses.hessian_action import (
    HessianAction,
    HessianActionLBFGS,
    MovingHessianAction,
    StepHessianAction,
)
from kfqn_ext.optim.inverses.scaled_identity import ScaledIdentity
from kfqn_ext.optim.inverses.secant import SecantBFGS, SecantLBFGS
from kfqn_ext.optim.inverses.unit import LargestTrace, LossUnit

__all__ = [
    "BatchInverse",
    "FisherAction",
    "FisherInverse",
    "GammaInverse",
    "HessianAction",
    "HessianActionLBFGS",
    "InputInverse",
    "Inverse",
    "LargestTrace",
    "LossUnit",
    "Measured",
    "MovingHessianAction",
    "MovingInverse",
    "OmegaInverse",
    "OutputInverse",
    "ScaledIdentity",
    "SecantBFGS",
    "SecantLBFGS",
    "Seen",
    "State",
    "StepHessianAction",
]
