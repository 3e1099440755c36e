"""BackPACK extensions that emit what Kronecker-factored quasi-Newton methods need from a layer."""

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.gram import InputGram
from kfqn_ext.extensions.hooks import extend, input_gradients_only, unextend
from kfqn_ext.extensions.kbfgs import GramOperator, KBFGSQuantities, LayerMoments

__all__ = [
    "GramOperator",
    "InputGram",
    "KBFGSQuantities",
    "LayerExtension",
    "LayerMoments",
    "extend",
    "input_gradients_only",
    "unextend",
]
