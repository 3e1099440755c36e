"""KFAC, ``algo_1``: the baseline whose factors are computed instead of learned."""

from dataclasses import replace
from typing import Any, Self, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.linalg import splits
from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import QUICK_BURN_IN, Schedule
from kfqn_ext.optim.inverses import GammaInverse, OmegaInverse
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.others import Momentum, plain
from kfqn_ext.optim.recipe import Recipe, SecondPass, untuned


@final
@shows_all_keywords
class KFAC(KroneckerOptimizer):
    """KFAC with Fisher factors from sampled targets, moving averages and exact inverses.

    Three forms. The default, ``recipe``, needs no tuning: the lengths of steps are set, and the damping is relative
    (:func:`untuned <kfqn_ext.optim.recipe.untuned>`). ``recipe_stable`` has the paper's steps, but a minibatch
    enters Ω and Γ before the step that it causes, and π = 1. ``recipe_as_printed`` is ``algo_1`` to the letter: the
    step first, and π from the traces. ``step`` takes a :class:`Minibatch`, which can sample targets.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import KFAC, Minibatch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> optimizer = KFAC(model)
        >>> batch = Minibatch(model, torch.nn.functional.cross_entropy, torch.rand(8, 4), torch.arange(8) % 3)
        >>> loss = optimizer.step(batch)
    """

    recipe_stable = Recipe(
        OmegaInverse(), GammaInverse(), splits.equal, SecondPass.SAMPLED_BEFORE_STEP, others=Momentum(plain)
    )
    recipe_as_printed = replace(recipe_stable, split=splits.trace, second_pass=SecondPass.SAMPLED_AFTER_STEP)
    recipe = untuned(recipe_stable)
    _update_freq = "stats_update_freq"

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.4,
        damping: float | Schedule = 0.1,
        stats_update_freq: int | Schedule = QUICK_BURN_IN,
        inverse_update_freq: int | Schedule = QUICK_BURN_IN,
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
            stats_update_freq: T₁ ≥ 1: a minibatch enters Ω and Γ when k is a multiple of T₁. By default
                these are the first ten steps, about each fifth until k = 100, and then each 20th.
            inverse_update_freq: T₂ ≥ 1: the inverses are recomputed when k is a multiple of T₂; by default as
                T₁.
            recipe: ``recipe_stable``, or changed cells: ``replace(KFAC.recipe_stable, split=splits.trace)``.
            second_pass_fraction: In (0, 1]: Ω and Γ are of this fraction of the minibatch, its first data.
        """
        super().__init__(
            model,
            params,
            recipe=self.recipe if recipe is None else recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=stats_update_freq,
            inverse_update_freq=inverse_update_freq,
            momentum=momentum,
            **shared,
        )

    @classmethod
    def as_printed(
        cls,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule,
        damping: float | Schedule,
        stats_update_freq: int | Schedule = 1,
        inverse_update_freq: int | Schedule = 20,
        momentum: float = 0.9,
        **shared: Unpack[Shared],
    ) -> Self:
        """Build ``algo_1`` as it is printed. It diverges at the paper's own best values on the MNIST autoencoder.

        ``algo_1`` is about layers alone; other parameters take the momentum direction at α.

        Args:
            lr: α ≥ 0 of the step αP, or a schedule.
            damping: λ > 0, in units of the loss's second derivative.
            stats_update_freq: T₁ ≥ 1: a minibatch enters Ω and Γ when k is a multiple of T₁.
            inverse_update_freq: T₂ ≥ 1: the inverses are recomputed when k is a multiple of T₂.
        """
        return cls(
            model,
            params,
            lr=lr,
            damping=damping,
            stats_update_freq=stats_update_freq,
            inverse_update_freq=inverse_update_freq,
            momentum=momentum,
            recipe=cls.recipe_as_printed,
            **shared,
        )
