"""K-BFGS-20 and K-BFGS(L)-20: the methods of Goldfarb, Ren and Bahamou (2020) that K-BFGS improves on.

They were published for fully-connected layers; on convolutions they are an extension of this package.
"""

from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.linalg import double_damping_2020, splits
from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import Schedule
from kfqn_ext.optim.inverses import MovingHessianAction, SecantBFGS, SecantLBFGS
from kfqn_ext.optim.inverses.scaled_identity import identity
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe


@final
@shows_all_keywords
class KBFGS20(KroneckerOptimizer):
    """K-BFGS-20: A is a moving average, both factors get √λ, and pairs are damped towards the identity.

    The momentum is M ← βM + g, as in the experiments of the 2022 paper; the 2020 code has βM + (1 - β)g, the same
    with a learning rate ten times as large.
    """

    recipe = Recipe(MovingHessianAction(), SecantBFGS(pair_damping=double_damping_2020, initial=identity), splits.equal)

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.01,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = 1,
        momentum: float = 0.9,
        **shared: Unpack[Shared],
    ) -> None:
        """Build the method of 2020.

        Args:
            lr: α ≥ 0 of the step αP, or a schedule.
            damping: λ > 0; both factors get √λ.
        """
        super().__init__(
            model,
            params,
            recipe=self.recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            **shared,
        )


@final
@shows_all_keywords
class KBFGSL20(KroneckerOptimizer):
    """K-BFGS(L)-20: K-BFGS-20 with H_G from the last p pairs, starting from the identity."""

    recipe = replace(KBFGS20.recipe, output_inverse=SecantLBFGS(pair_damping=double_damping_2020, initial=identity))

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.01,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = 1,
        momentum: float = 0.9,
        history_size: int = 100,
        **shared: Unpack[Shared],
    ) -> None:
        """Build the method of 2020.

        Args:
            lr: α ≥ 0 of the step αP, or a schedule.
            damping: λ > 0; both factors get √λ.
            history_size: p ≥ 1: how many pairs are kept.
        """
        rule = SecantLBFGS(history_size=history_size, pair_damping=double_damping_2020, initial=identity)
        super().__init__(
            model,
            params,
            recipe=replace(self.recipe, output_inverse=rule),
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            **shared,
        )
