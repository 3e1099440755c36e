"""The variant of K-BFGS(L) whose convergence is proved, ``algo_7``, with the constants of its theory."""

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from kfqn_ext.linalg import powell_identity_lm
from kfqn_ext.linalg.splits import Given
from kfqn_ext.optim.groups.schedules import Schedule
from kfqn_ext.optim.inverses import BatchInverse, SecantLBFGS
from kfqn_ext.optim.numbers import number
from kfqn_ext.optim.optimizer import KroneckerOptimizer
from kfqn_ext.optim.recipe import Recipe


@final
class ProvableKBFGSL(KroneckerOptimizer):
    """K-BFGS(L) with D_P(I) D_LM, the exact inverse of each minibatch's A + λ_A I, and no momentum: ``sec_2``."""

    recipe = Recipe(BatchInverse(), SecantLBFGS(pair_damping=powell_identity_lm), Given(1.0, 1.0))

    def __init__(
        self,
        model: nn.Module,
        params: Any = None,
        *,
        lr: float | Tensor | Schedule,
        damping_A: float = 1.0,
        damping_G: float = 1.0,
        mu1: float = 0.2,
        decay: float = 0.9,
        history_size: int = 100,
        curvature_update_freq: int | Schedule = 1,
        reduction: str = "mean",
    ) -> None:
        """Build it, with the damping of each factor.

        Args:
            model: The model; :func:`kfqn_ext.extend` is called on it.
            params: Parameters or groups of them, as for any ``torch.optim`` optimizer; all of the model's if None.
            lr: α_k; :func:`theorem_step_sizes` has the theorem's.
            damping_A: λ_A > 0, of every layer.
            damping_G: λ_G > 0, of every layer.
            mu1: 0 < μ₁ < 1 of D_P(I) D_LM.
            decay: 0 < β < 1 of the moving averages of pairs.
            history_size: p, how many pairs are kept.
            curvature_update_freq: T; the proofs hold for every T.
            reduction: "mean" or "sum": what the loss does over the data of a batch.
        """
        damping_A, damping_G, mu1, decay = (number(value) for value in (damping_A, damping_G, mu1, decay))
        for name, value in (("damping_A", damping_A), ("damping_G", damping_G)):
            if not value > 0:
                raise ValueError(f"Invalid {name}: {value}. It must be positive.")
        rule = SecantLBFGS(history_size=history_size, pair_damping=powell_identity_lm, mu1=mu1, decay=decay)
        super().__init__(
            model,
            params,
            recipe=Recipe(BatchInverse(), rule, Given(damping_A, damping_G)),
            lr=lr,
            damping=damping_A * damping_G,
            curvature_update_freq=curvature_update_freq,
            momentum=0.0,
            reduction=reduction,
        )


@dataclass(frozen=True)
class KappaBounds:
    """Bounds κ_low I ⪯ H_A ⊗ H_G ⪯ κ_high I of one layer, ``lemma_1``, with those of H_G, ``lemma_5``.

    Attributes:
        low: κ_low.
        high: κ_high; it grows like 13.3ᵖ and is a bound, not an estimate.
        low_G: Lower bound of H_G.
        high_G: Upper bound of H_G.
    """

    low: float
    high: float
    low_G: float
    high_G: float


def kappa_bounds(
    patch_norm2: float,
    num_locations: int,
    damping_A: float,
    damping_G: float,
    history_size: int,
    mu1: float = 0.2,
) -> KappaBounds:
    """Compute the constants of ``lemma_5`` and ``lemma_1`` for one layer.

    H_G is bounded by ``lemma_4``, once for each of p pairs, and H_A by ``eq_9``.

    Args:
        patch_norm2: Bound on ‖a_t‖²: J|Δ|φ² + 1 where every input is at most φ in absolute value.
        num_locations: |T|.
        damping_A: λ_A.
        damping_G: λ_G.
        history_size: p.
        mu1: μ₁.

    Returns:
        The bounds.
    """
    mu2 = damping_G
    mu3 = mu1 / (mu2 * (1.0 + 2.0 * mu1))
    growth = (1.0 + (mu2 * mu3) ** -0.5) ** 2
    low_G = 1.0 / (damping_G + history_size / mu3)
    high_G = growth**history_size / damping_G + (growth**history_size - 1.0) / (growth - 1.0) / mu2
    return KappaBounds(
        low=low_G / (patch_norm2 * num_locations + damping_A), high=high_G / damping_A, low_G=low_G, high_G=high_G
    )


def theorem_step_sizes(kappa_low: float, kappa_high: float, lipschitz: float, beta: float) -> Schedule:
    """α_k = κ_low / (L κ_high²) k^-β, ``thm_3``: a schedule for ``lr``.

    Args:
        kappa_low: The smallest κ_low of all layers.
        kappa_high: The largest κ_high of all layers.
        lipschitz: L, Lipschitz constant of the gradient.
        beta: β in (0.5, 1).

    Returns:
        k ↦ α_k.

    Raises:
        ValueError: If β is out of range.
    """
    if not 0.5 < beta < 1.0:
        raise ValueError(f"Invalid beta: {beta}. The theorem needs it in (0.5, 1).")
    first = kappa_low / (lipschitz * kappa_high**2)
    return lambda k: first * k**-beta
