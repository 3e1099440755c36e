"""KFAC, ``algo_1``: the baseline whose factors are computed instead of learned."""

from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.linalg import splits
from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import BURN_IN, Schedule
from kfqn_ext.optim.inverses import GammaInverse, OmegaInverse
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe, SecondPass, plain


@final
@shows_all_keywords
class KFAC(KroneckerOptimizer):
    """KFAC with Fisher factors from sampled targets, moving averages and exact inverses.

    The stable form, :attr:`recipe`: a minibatch enters Ω and Γ before the step that it causes, and inverses are
    recomputed often at first. :attr:`recipe_as_printed` is ``algo_1`` as it is printed: the step first, and π from the
    traces. ``step`` takes a :class:`Minibatch`, which can sample targets.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import KFAC, Minibatch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> optimizer = KFAC(model, lr=0.1, damping=1.0)
        >>> batch = Minibatch(model, torch.nn.functional.cross_entropy, torch.rand(8, 4), torch.arange(8) % 3)
        >>> loss = optimizer.step(batch)
    """

    recipe = Recipe(OmegaInverse(), GammaInverse(), splits.equal, SecondPass.SAMPLED_BEFORE_STEP, plain)
    recipe_as_printed = replace(recipe, split=splits.trace, second_pass=SecondPass.SAMPLED_AFTER_STEP)
    _update_freq = "stats_update_freq"

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule = 0.1,
        damping: float | Schedule = 1.0,
        stats_update_freq: int | Schedule = 1,
        inverse_update_freq: int | Schedule = BURN_IN,
        recipe: Recipe | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """See :class:`KroneckerOptimizer`.

        Args:
            model: See there, as for what is not listed here.
            params: See there.
            lr: See there.
            damping: See there.
            stats_update_freq: T₁: a minibatch enters Ω and Γ when k is a multiple of T₁.
            inverse_update_freq: T₂: the inverses are recomputed when k is a multiple of T₂.
            recipe: A changed cell, for example ``replace(KFAC.recipe, split=splits.trace)`` for adaptive π.
            **shared: See there; with a ``second_pass_fraction``, Ω and Γ are of this fraction of the minibatch.
        """
        super().__init__(
            model,
            params,
            recipe=self.recipe if recipe is None else recipe,
            lr=lr,
            damping=damping,
            curvature_update_freq=stats_update_freq,
            inverse_update_freq=inverse_update_freq,
            **shared,
        )

    @classmethod
    def as_printed(
        cls,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float,
        damping: float,
        stats_update_freq: int = 1,
        inverse_update_freq: int = 20,
        weight_decay: float = 0.0,
    ) -> "KFAC":
        """Build ``algo_1`` as it is printed. It diverges at the paper's own best values on the MNIST autoencoder.

        ``algo_1`` is about layers alone; other parameters take the momentum direction at α, as in :class:`KFAC`.
        """
        return cls(
            model,
            params,
            lr=lr,
            damping=damping,
            stats_update_freq=stats_update_freq,
            inverse_update_freq=inverse_update_freq,
            weight_decay=weight_decay,
            recipe=cls.recipe_as_printed,
        )
