"""BackPACK extensions that emit what Kronecker-factored quasi-Newton methods need from a layer."""

from kfqn_ext.extensions.active import has_backpacks_hooks, measuring, read_inputs
from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.calls import SingleCalls
from kfqn_ext.extensions.fisher_product import FisherProduct, FisherProducts, OutputProbe
from kfqn_ext.extensions.gram import Gram, InputGram
from kfqn_ext.extensions.gram_operator import GramOperator
from kfqn_ext.extensions.hooks import extend, input_gradients_only, listen, unextend
from kfqn_ext.extensions.inputs import InputMoments, InputQuantities, Probe
from kfqn_ext.extensions.kbfgs import KBFGSQuantities, LayerMoments, with_outputs
from kfqn_ext.extensions.kfac import KFACFactors, KroneckerFactors
from kfqn_ext.extensions.pooling import averaged, pooled
from kfqn_ext.extensions.traces import FactorTraces, InputTrace, InputTraces, Traces

__all__ = [
    "FactorTraces",
    "FisherProduct",
    "FisherProducts",
    "Gram",
    "GramOperator",
    "InputGram",
    "InputMoments",
    "InputQuantities",
    "InputTrace",
    "InputTraces",
    "KBFGSQuantities",
    "KFACFactors",
    "KroneckerFactors",
    "LayerExtension",
    "LayerMoments",
    "OutputProbe",
    "Probe",
    "SingleCalls",
    "Traces",
    "averaged",
    "extend",
    "has_backpacks_hooks",
    "input_gradients_only",
    "listen",
    "measuring",
    "pooled",
    "read_inputs",
    "unextend",
    "with_outputs",
]
