"""K-BFGS from one pass: for any training loop, without a closure."""

from typing import Any, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import QUICK_BURN_IN, Schedule
from kfqn_ext.optim.inverses import FisherAction, StepHessianAction
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe, SecondPass, untuned


@final
@shows_all_keywords
class OnePassKBFGS(KroneckerOptimizer):
    """K-BFGS that learns from the backward pass that training runs anyway: ``loss.backward(); optimizer.step()``.

    A layer moves along H_G M H_A, with M its momentum. H_A, [*B, d_in, d_in], approximates (A + λ_A I)⁻¹. Here
    A = E_n[Σ_t a_t a_tᵀ] is a mean over data of sums over locations t. H_A is learned as in K-BFGS, ``algo_8`` of
    arXiv:2102.06737, along more directions and averaged. H_G, [*B, d_out, d_out], is learned from products with the
    minibatch's own Fisher factor Γ = E_n[mean_t ∂h_t ∂h_tᵀ], in place of the changes that a step makes. So no second
    pass is needed, and no closure.

    A backward pass that adds to ``.grad`` is measured when curvature is due, and nobody has to announce it. Gradient
    accumulation, clipping, gradient scalers and trainers work as with any ``torch.optim`` optimizer.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import OnePassKBFGS
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> optimizer = OnePassKBFGS(model)
        >>> x, y = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
        >>> torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    recipe = untuned(Recipe(StepHessianAction(), FisherAction(), second_pass=SecondPass.NONE))

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.4,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = QUICK_BURN_IN,
        momentum: float = 0.8,
        recipe: Recipe | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Build it; nothing has to be tuned.

        Args:
            lr: α ≥ 0. The largest singular value of a layer's ΔW is α max(1, √(d_out / d_in)), times a factor of at
                most 1: :class:`~kfqn_ext.optim.lengths.SignalToNoise`. Parameters without a block move at α/10. A
                function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets the
                group's value.
            damping: ε > 0, in units of each factor's mean eigenvalue.
            curvature_update_freq: T ≥ 1: curvature is learned when k is a multiple of T. By default
                these are the first ten steps, about each fifth until k = 100, and then each 20th.
            recipe: Changed cells: ``replace(OnePassKBFGS.recipe, ...)``.
        """
        super().__init__(
            model,
            params,
            recipe=self.recipe if recipe is None else recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            **shared,
        )
