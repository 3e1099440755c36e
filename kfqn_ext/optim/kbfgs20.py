"""K-BFGS-20 and K-BFGS(L)-20: the methods of Goldfarb, Ren and Bahamou (2020) that K-BFGS improves on.

They were published for fully-connected layers; on convolutions they are an extension of this package.
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from kfqn_ext.linalg import double_damping_2020
from kfqn_ext.optim import splits
from kfqn_ext.optim.base import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.schedules import Schedule
from kfqn_ext.optim.sides import DenseSecant, LimitedSecant, MovingHessianAction
from kfqn_ext.optim.sides.scaled_identity import identity


@final
class KBFGS20(KroneckerOptimizer):
    """K-BFGS-20: A is a moving average, both factors get √λ, and pairs are damped towards the identity.

    The momentum is M ← βM + g, as in the experiments of the 2022 paper; the 2020 code has βM + (1 - β)g, the same
    with a learning rate ten times as large.
    """

    recipe = Recipe(
        MovingHessianAction(), DenseSecant(pair_damping=double_damping_2020, initial=identity), splits.equal
    )

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.01,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        direction_dtype: torch.dtype | None = None,
        second_pass_fraction: float = 1.0,
        reduction: str = "mean",
    ) -> None:
        """See :class:`KroneckerOptimizer`."""
        super().__init__(
            model,
            params,
            recipe=self.recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            weight_decay=weight_decay,
            step_cap=step_cap,
            direction_dtype=direction_dtype,
            second_pass_fraction=second_pass_fraction,
            reduction=reduction,
        )


@final
class KBFGSL20(KroneckerOptimizer):
    """K-BFGS(L)-20: K-BFGS-20 with H_G from the last p pairs, starting from the identity."""

    recipe = Recipe(
        MovingHessianAction(), LimitedSecant(pair_damping=double_damping_2020, initial=identity), splits.equal
    )

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.01,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = 1,
        history_size: int = 100,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        direction_dtype: torch.dtype | None = None,
        second_pass_fraction: float = 1.0,
        reduction: str = "mean",
    ) -> None:
        """See :class:`KroneckerOptimizer`; ``history_size`` is p, how many pairs are kept."""
        side = LimitedSecant(memory=history_size, pair_damping=double_damping_2020, initial=identity)
        super().__init__(
            model,
            params,
            recipe=Recipe(MovingHessianAction(), side, splits.equal),
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            weight_decay=weight_decay,
            step_cap=step_cap,
            direction_dtype=direction_dtype,
            second_pass_fraction=second_pass_fraction,
            reduction=reduction,
        )
