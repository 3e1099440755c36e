"""K-BFGS and K-BFGS(L), ``algo_8``."""

from dataclasses import replace
from typing import Any, Self, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import BURN_IN, QUICK_BURN_IN, Schedule
from kfqn_ext.optim.inverses import HessianAction, LargestTrace, SecantBFGS, SecantLBFGS, StepHessianAction
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe, untuned


@final
@shows_all_keywords
class KBFGS(KroneckerOptimizer):
    """K-BFGS: Kronecker-factored BFGS for linear and convolutional layers, ``algo_8``.

    Approximates the inverse of a layer's Hessian block by H_A ⊗ H_G, both learned by BFGS: H_A from products with
    this minibatch's A, H_G from the changes of h̄ and ∂h̄ that a step makes.

    The default needs no tuning: the lengths of steps are set, the damping is relative (:func:`untuned
    <kfqn_ext.optim.recipe.untuned>`), H_A learns along four more directions, and H_G counts in a unit that grows with
    the gradients. :meth:`as_printed` is ``algo_8`` to the letter.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import KBFGS, Minibatch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> optimizer = KBFGS(model)
        >>> x, y = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
        >>> loss = optimizer.step(Minibatch(model, torch.nn.functional.cross_entropy, x, y))
    """

    recipe_as_printed = Recipe(HessianAction(), SecantBFGS())
    recipe = untuned(Recipe(StepHessianAction(), SecantBFGS(unit=LargestTrace())))

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
        """Build the form that needs no tuning.

        Args:
            lr: α ≥ 0. The largest singular value of a layer's ΔW is α max(1, √(d_out / d_in)), times a factor of at
                most 1: :class:`~kfqn_ext.optim.lengths.SignalToNoise`. Parameters without a block move at α/10. A
                function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets the
                group's value.
            damping: ε > 0, in units of each factor's mean eigenvalue.
            curvature_update_freq: T ≥ 1: curvature is learned when k is a multiple of T. By default
                these are the first ten steps, about each fifth until k = 100, and then each 20th.
            recipe: For changed cells: ``replace(KBFGS.recipe, split=...)``.
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

    @classmethod
    def as_printed(
        cls,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
        momentum: float = 0.9,
        **shared: Unpack[Shared],
    ) -> Self:
        """Build ``algo_8`` as it is printed: steps αP, and λ in units of the loss. Both are to be tuned together.

        The defaults train slowly. A search begins with α = λ = 0.1.

        Args:
            lr: α ≥ 0 of the step αP, or a schedule.
            damping: λ > 0, in units of the loss's second derivative.
            curvature_update_freq: T ≥ 1: curvature is learned when k is a multiple of T. T grows from 1 to
                20 in 400 steps.
        """
        return cls(
            model,
            params,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            recipe=cls.recipe_as_printed,
            **shared,
        )


@final
@shows_all_keywords
class KBFGSL(KroneckerOptimizer):
    """K-BFGS(L): K-BFGS with H_G from the last p pairs by L-BFGS in compact form, ``algo_8``.

    Its default and :meth:`as_printed` differ as those of :class:`KBFGS` do.
    """

    recipe_as_printed = replace(KBFGS.recipe_as_printed, output_inverse=SecantLBFGS())
    recipe = replace(KBFGS.recipe, output_inverse=SecantLBFGS(unit=LargestTrace()))

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.4,
        damping: float | Schedule = 0.1,
        curvature_update_freq: int | Schedule = QUICK_BURN_IN,
        momentum: float = 0.8,
        history_size: int | None = None,
        recipe: Recipe | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Build the form that needs no tuning.

        Args:
            lr: α ≥ 0. The largest singular value of a layer's ΔW is α max(1, √(d_out / d_in)), times a factor of at
                most 1: :class:`~kfqn_ext.optim.lengths.SignalToNoise`. Parameters without a block move at α/10. A
                function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets the
                group's value.
            damping: ε > 0, in units of each factor's mean eigenvalue.
            curvature_update_freq: T ≥ 1: curvature is learned when k is a multiple of T. By default
                these are the first ten steps, about each fifth until k = 100, and then each 20th.
            history_size: p ≥ 1: how many pairs are kept; None for the recipe's, 100.
            recipe: For changed cells: ``replace(KBFGSL.recipe, split=...)``.

        Raises:
            ValueError: If ``history_size`` is given beside a recipe that keeps no pairs.
        """
        super().__init__(
            model,
            params,
            recipe=_with_history(self.recipe if recipe is None else recipe, history_size),
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            **shared,
        )

    @classmethod
    def as_printed(
        cls,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.3,
        damping: float | Schedule = 30.0,
        curvature_update_freq: int | Schedule = BURN_IN,
        momentum: float = 0.9,
        history_size: int = 100,
        **shared: Unpack[Shared],
    ) -> Self:
        """Build ``algo_8`` as it is printed; see :meth:`KBFGS.as_printed`.

        Args:
            lr: α ≥ 0 of the step αP, or a schedule.
            damping: λ > 0, in units of the loss's second derivative.
            curvature_update_freq: T ≥ 1: curvature is learned when k is a multiple of T. T grows from 1 to
                20 in 400 steps.
            history_size: p ≥ 1: how many pairs are kept.
        """
        return cls(
            model,
            params,
            lr=lr,
            damping=damping,
            curvature_update_freq=curvature_update_freq,
            momentum=momentum,
            history_size=history_size,
            recipe=cls.recipe_as_printed,
            **shared,
        )


def _with_history(recipe: Recipe, history_size: int | None) -> Recipe:
    """A recipe whose H_G is made of so many pairs."""
    rule = recipe.output_inverse
    if history_size is None:
        return recipe
    if not isinstance(rule, SecantLBFGS):
        raise ValueError(
            f"history_size={history_size}: {type(rule).__name__}, the recipe's rule for H_G, keeps no pairs. Leave "
            "history_size out, or take a recipe with SecantLBFGS."
        )
    return replace(recipe, output_inverse=replace(rule, history_size=history_size))
