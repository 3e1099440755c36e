"""Every row of the table, once: its name, how tests build it, and the class it stands for.

A suite over the family takes ``FAMILY``; a new public class without an entry here fails ``test_family.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from kfqn_ext.linalg import double_damping_2020, splits
from kfqn_ext.optim import (
    KBFGS,
    KBFGS20,
    KBFGSL,
    KBFGSL20,
    KFAC,
    KroneckerOptimizer,
    ProvableKBFGSL,
    running_mean,
)
from kfqn_ext.optim.inverses import (
    GammaInverse,
    HessianActionLBFGS,
    MovingHessianAction,
    OmegaInverse,
    ScaledIdentity,
    SecantBFGS,
    SecantLBFGS,
)
from kfqn_ext.optim.recipe import Recipe, SecondPass


@dataclass(frozen=True)
class Member:
    """One row.

    Attributes:
        build: The class, or what makes the optimizer with its keywords.
        fixed: Keywords that the row always gets.
        T: What it calls the frequency at which it learns.
        given_damping: Whether it takes λ_A and λ_G in place of λ.
    """

    build: Callable[..., KroneckerOptimizer]
    fixed: dict[str, Any] = field(default_factory=dict)
    T: str = "curvature_update_freq"
    given_damping: bool = False

    def make(self, model: nn.Module, *, lr: Any, damping: Any = 1.0, T: Any = 1, **options: Any) -> KroneckerOptimizer:
        """Build it, whatever it calls things; options that it does not have are an error, as for a user."""
        options = {**self.fixed, **options, self.T: T}
        if self.given_damping:
            options |= {"damping_A": damping**0.5, "damping_G": damping**0.5}
            options.pop("weight_decay", None)
        else:
            options["damping"] = damping
        return self.build(model, lr=lr, **options)


def cell(**changed: Any) -> Member:
    """K-BFGS with changed cells of its recipe."""
    return Member(KroneckerOptimizer, {"recipe": replace(KBFGS.recipe, **changed)})


def kfac(recipe: Recipe, **fixed: Any) -> Member:
    return Member(KFAC, {"recipe": recipe, "inverse_update_freq": 1, **fixed}, T="stats_update_freq")


FAMILY: dict[str, Member] = {
    "KBFGS": Member(KBFGS),
    "KBFGSL": Member(KBFGSL, {"history_size": 2}),  # in compact form
    "KBFGSL, many pairs": Member(KBFGSL),  # formed
    "KBFGS20": Member(KBFGS20),
    "KBFGSL20": Member(KBFGSL20, {"history_size": 2}),
    "ProvableKBFGSL": Member(ProvableKBFGSL, {"history_size": 3}, given_damping=True),
    "KFAC": kfac(KFAC.recipe),
    "KFAC as printed": kfac(KFAC.recipe_as_printed),
    "KFAC, adaptive π": kfac(replace(KFAC.recipe, split=splits.trace)),
    "KFAC, running mean": kfac(
        replace(
            KFAC.recipe, input_inverse=OmegaInverse(running_mean(0.6)), output_inverse=GammaInverse(running_mean(0.6))
        )
    ),
    "#1 off": cell(output_inverse=SecantBFGS(pair_damping=double_damping_2020)),
    "#2 off": cell(input_inverse=MovingHessianAction()),
    "L-BFGS for H_A": cell(input_inverse=HessianActionLBFGS(history_size=2)),
    "L-BFGS for both": cell(
        input_inverse=HessianActionLBFGS(history_size=2), output_inverse=SecantLBFGS(history_size=2)
    ),
    "trace split": cell(split=splits.trace),
    "one pass": cell(output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE),
    "one pass, L-BFGS for H_A": cell(
        input_inverse=HessianActionLBFGS(history_size=2), output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE
    ),
}
ONE_PER_CLASS = ("KBFGS", "KBFGSL", "KBFGS20", "KBFGSL20", "ProvableKBFGSL", "KFAC")
