"""How the damping λ of a layer's block is shared by its two factors: λ ↦ (λ_A, λ_G) with λ_A λ_G = λ."""

from math import sqrt


def spatial(damping: float, num_locations: float) -> tuple[float, float]:
    """λ_A = √|T| √λ and λ_G = √λ / √|T|, ``algo_8``: as if both factors were sums over √|T| locations."""
    return sqrt(damping * num_locations), sqrt(damping / num_locations)


def equal(damping: float, num_locations: float) -> tuple[float, float]:
    """λ_A = λ_G = √λ, as K-BFGS-20 splits it."""
    return sqrt(damping), sqrt(damping)
