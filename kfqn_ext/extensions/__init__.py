"""BackPACK extensions that emit what Kronecker-factored quasi-Newton methods need from a layer."""

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.gram import Gram, InputGram
from kfqn_ext.extensions.hooks import extend, input_gradients_only, unextend
from kfqn_ext.extensions.kbfgs import GramOperator, KBFGSQuantities, LayerMoments, ShiftInvariantQuantities
from kfqn_ext.extensions.kfac import KFACFactors, KroneckerFactors
from kfqn_ext.extensions.pooling import averaged, pooled
from kfqn_ext.extensions.power import FactorPower, Power

__all__ = [
    "FactorPower",
    "Gram",
    "GramOperator",
    "InputGram",
    "KBFGSQuantities",
    "KFACFactors",
    "KroneckerFactors",
    "LayerExtension",
    "LayerMoments",
    "Power",
    "ShiftInvariantQuantities",
    "averaged",
    "extend",
    "input_gradients_only",
    "pooled",
    "unextend",
]
