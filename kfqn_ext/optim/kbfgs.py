"""K-BFGS and K-BFGS(L), ``algo_8``."""

from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import BURN_IN, Schedule
from kfqn_ext.optim.inverses import HessianAction, SecantBFGS, SecantLBFGS
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe


@final
@shows_all_keywords
class KBFGS(KroneckerOptimizer):
    """K-BFGS: Kronecker-factored BFGS for linear and convolutional layers, ``algo_8``.

    Approximates the inverse of a layer's Hessian block by H_A ⊗ H_G, both learned by BFGS: H_A from products with
    this minibatch's A, H_G from the changes of h̄ and ∂h̄ that a step makes.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import KBFGS, Minibatch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> optimizer = KBFGS(model, lr=0.3, damping=30.0)
        >>> x, y = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
        >>> loss = optimizer.step(Minibatch(model, torch.nn.functional.cross_entropy, x, y))
    """

    recipe = Recipe(HessianAction(), SecantBFGS())

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
        **shared: Unpack[Shared],
    ) -> None:
        """See :class:`KroneckerOptimizer`."""
        super().__init__(
            model,
            params,
            recipe=self.recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            **shared,
        )


@final
@shows_all_keywords
class KBFGSL(KroneckerOptimizer):
    """K-BFGS(L): K-BFGS with H_G from the last p pairs by L-BFGS in compact form, ``algo_8``."""

    recipe = replace(KBFGS.recipe, output_inverse=SecantLBFGS())

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
        history_size: int = 100,
        **shared: Unpack[Shared],
    ) -> None:
        """See :class:`KroneckerOptimizer`; ``history_size`` is p, how many pairs are kept."""
        super().__init__(
            model,
            params,
            recipe=replace(self.recipe, output_inverse=SecantLBFGS(history_size=history_size)),
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            **shared,
        )
