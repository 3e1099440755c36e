"""One optimizer = one row of a table: how each side learns, and how the damping is shared."""

from collections.abc import Callable
from dataclasses import dataclass

from kfqn_ext.optim import splits
from kfqn_ext.optim.sides import InputSide, OutputSide


def over_damping(lr: float, damping: float) -> float:
    """α / λ: the step of K-BFGS where the curvature is small beside the damping."""
    return lr / damping


@dataclass(frozen=True)
class Recipe:
    """What distinguishes one member of the family from another.

    Attributes:
        input_side: How H_A is learned.
        output_side: How H_G is learned.
        split: (λ, |T|) ↦ (λ_A, λ_G).
        fallback_rate: (α, λ) ↦ rate of the momentum direction for parameters without a Kronecker block.
    """

    input_side: InputSide
    output_side: OutputSide
    split: Callable[[float, float], tuple[float, float]] = splits.spatial
    fallback_rate: Callable[[float, float], float] = over_damping
