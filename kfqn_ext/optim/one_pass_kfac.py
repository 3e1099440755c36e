"""KFAC from one pass: for any training loop, without a closure."""

from typing import Any, final

from torch import Tensor, nn
from typing_extensions import Unpack

from kfqn_ext.optim.groups.hyperparameters import Shared, shows_all_keywords
from kfqn_ext.optim.groups.schedules import QUICK_BURN_IN, Schedule
from kfqn_ext.optim.inverses import FisherInverse, MovingInverse
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe, SecondPass, untuned


@final
@shows_all_keywords
class OnePassKFAC(KroneckerOptimizer):
    """KFAC with the data's own targets, from the pass that training runs anyway: ``loss.backward(); optimizer.step()``.

    ``algo_1`` but for its targets. A, [*B, d_in, d_in], is a mean over data of sums over locations, and Γ,
    [*B, d_out, d_out], one over data and locations. Both are averaged over minibatches and inverted, as in
    :class:`KFAC`. But Γ is of the minibatch's own gradients, in units of its mean eigenvalue: the "empirical" Fisher
    factor. No targets are sampled, so that no second pass is needed, no closure, and any loss will do.

    :class:`OnePassKBFGS` learns both inverses in d² operations an update. Here an update takes d³, and the state is
    twice as large. Where layers are wide that costs more time; on small networks it is as fast, and the loss ends
    lower.

    A minibatch enters A and Γ after the step that it causes. Gradient accumulation, clipping, gradient scalers and
    trainers work as with any ``torch.optim`` optimizer.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import OnePassKFAC
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> optimizer = OnePassKFAC(model)
        >>> x, y = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
        >>> torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    recipe = untuned(Recipe(MovingInverse(), FisherInverse(), second_pass=SecondPass.NONE))
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
        """Build it; nothing has to be tuned.

        Args:
            lr: α ≥ 0. The largest singular value of a layer's ΔW is α max(1, √(d_out / d_in)), times a factor of at
                most 1: :class:`~kfqn_ext.optim.lengths.SignalToNoise`. Parameters without a block move at α/10. A
                function of the step k = 1, 2, … makes a schedule, here and below, until somebody else sets the
                group's value.
            damping: ε > 0, in units of each factor's mean eigenvalue.
            stats_update_freq: T₁ ≥ 1: a minibatch enters A and Γ when k is a multiple of T₁. By default
                these are the first ten steps, about each fifth until k = 100, and then each 20th.
            inverse_update_freq: T₂ ≥ 1: the inverses are recomputed when k is a multiple of T₂; by default as
                T₁.
            recipe: Changed cells: ``replace(OnePassKFAC.recipe, ...)``.
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
