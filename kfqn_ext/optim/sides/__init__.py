"""How one Kronecker inverse is learned: the columns of the table that is the optimizer package."""

from kfqn_ext.optim.sides.base import InputSide, Measured, OutputSide, Seen, State
from kfqn_ext.optim.sides.direct import BatchInverse, GammaInverse, OmegaInverse
from kfqn_ext.optim.sides.hessian_action import HessianAction, LimitedHessianAction, MovingHessianAction
from kfqn_ext.optim.sides.scaled_identity import ScaledIdentity
from kfqn_ext.optim.sides.secant import DenseSecant, LimitedSecant

__all__ = [
    "BatchInverse",
    "DenseSecant",
    "GammaInverse",
    "HessianAction",
    "InputSide",
    "LimitedHessianAction",
    "LimitedSecant",
    "Measured",
    "MovingHessianAction",
    "OmegaInverse",
    "OutputSide",
    "ScaledIdentity",
    "Seen",
    "State",
]
