"""K-BFGS and K-BFGS(L), ``algo_8``."""

from typing import Any, final

import torch
from torch import Tensor, nn

from kfqn_ext.optim.base import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe
from kfqn_ext.optim.schedules import BURN_IN, Schedule
from kfqn_ext.optim.sides import DenseSecant, HessianAction, LimitedSecant


@final
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

    recipe = Recipe(HessianAction(), DenseSecant())

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
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
class KBFGSL(KroneckerOptimizer):
    """K-BFGS(L): K-BFGS with H_G from the last p pairs by L-BFGS in compact form, ``algo_8``."""

    recipe = Recipe(HessianAction(), LimitedSecant())

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
        history_size: int = 100,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        direction_dtype: torch.dtype | None = None,
        second_pass_fraction: float = 1.0,
        reduction: str = "mean",
    ) -> None:
        """See :class:`KroneckerOptimizer`; ``history_size`` is p, how many pairs are kept."""
        super().__init__(
            model,
            params,
            recipe=Recipe(HessianAction(), LimitedSecant(memory=history_size)),
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
