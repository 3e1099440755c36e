"""How one Kronecker inverse is learned: the columns of the table that is the optimizer package."""

from kfqn_ext.optim.sides.base import InputSide, OutputSide, Seen, State
from kfqn_ext.optim.sides.hessian_action import HessianAction
from kfqn_ext.optim.sides.secant import DenseSecant, LimitedSecant

__all__ = ["DenseSecant", "HessianAction", "InputSide", "LimitedSecant", "OutputSide", "Seen", "State"]
