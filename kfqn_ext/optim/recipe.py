"""One optimizer = one row of a table: how each side learns, how the damping is shared, what a second pass is for."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from kfqn_ext.optim import splits
from kfqn_ext.optim.sides import InputSide, OutputSide


class SecondPass(Enum):
    """When a second pass over a minibatch runs, and on which targets."""

    NONE = "none"
    REPEAT_AFTER_STEP = "the data's targets, after the step: what the step did to ∂h̄"
    SAMPLED_AFTER_STEP = "targets sampled from the model, after the step: Fisher factors, algo_1 as printed"
    SAMPLED_BEFORE_STEP = "targets sampled from the model, before the step: Fisher factors that the step uses"

    @property
    def sampled(self) -> bool:
        """Whether targets come from the model's predictive distribution."""
        return self in (SecondPass.SAMPLED_AFTER_STEP, SecondPass.SAMPLED_BEFORE_STEP)


Rate = float | Tensor


def over_damping(lr: Rate, damping: float) -> Rate:
    """α / λ: the step of K-BFGS where the curvature is small beside the damping."""
    return lr / damping


def plain(lr: Rate, damping: float) -> Rate:
    """α, as KFAC steps its BatchNorm parameters."""
    return lr


@dataclass(frozen=True)
class Recipe:
    """What distinguishes one member of the family from another.

    Attributes:
        input_side: How H_A is learned.
        output_side: How H_G is learned.
        split: (λ, what is known of the factors) ↦ (λ_A, λ_G).
        second_pass: When the second pass runs and on which targets.
        fallback_rate: (α, λ) ↦ rate of the momentum direction for parameters without a Kronecker block.
    """

    input_side: InputSide
    output_side: OutputSide
    split: splits.Split = splits.spatial
    second_pass: SecondPass = SecondPass.REPEAT_AFTER_STEP
    fallback_rate: Callable[[Rate, float], Rate] = over_damping

    def __post_init__(self) -> None:
        """Check that there is a second pass where a side learns from one."""
        sides = [type(side).__name__ for side in (self.input_side, self.output_side) if side.second]
        if sides and self.second_pass is SecondPass.NONE:
            raise ValueError(
                f"Invalid recipe: {' and '.join(sides)} learn from a second pass, and second_pass is NONE. Give the "
                "second pass, or sides that need none: replace(KBFGS.recipe, output_side=ScaledIdentity(), "
                "second_pass=SecondPass.NONE)."
            )
