"""``table_4`` and ``table_5``, with 1 for every constant that the O(·) hides.

What a method costs follows from how it learns its two inverses, of which the paper's tables have three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from kfqn_ext.optim import inverses
from kfqn_ext.optim.recipe import Recipe
from workloads.layer_sizes import LayerSize
from workloads.methods import METHODS, Settings

PAIRS = 100  # p
STATE_PARTS = ("∂W", "∂W ⊙ ∂W", "A, H_A", "G, H_G")
TIME_PARTS = ("gradient", "additional pass", "curvature", "direction")


@dataclass(frozen=True)
class Frequencies:
    """T of K-BFGS; T₁ and T₂ of KFAC."""

    T: int = 1
    T1: int = 1


@dataclass(frozen=True)
class InverseCosts:
    """Costs of one inverse of a layer, d × d.

    Attributes:
        state: How many numbers it keeps.
        datum: Multiplications for each datum and location when it learns.
        update: Multiplications when it learns, or inverts, whatever the data.
        direction: Multiplications for the product with one vector.
    """

    state: int
    datum: int
    update: int
    direction: int


def _bfgs(d: int) -> InverseCosts:
    return InverseCosts(state=d**2, datum=d, update=d**2, direction=d**2)


def _bfgs_of_a_matrix(d: int) -> InverseCosts:
    """The matrix itself is formed, as K-BFGS-20 does."""
    return InverseCosts(state=d**2, datum=d**2, update=d**2, direction=d**2)


def _limited(d: int) -> InverseCosts:
    return InverseCosts(state=PAIRS * d, datum=d, update=PAIRS * d, direction=PAIRS * d)


def _inverse(d: int) -> InverseCosts:
    return InverseCosts(state=d**2, datum=d**2, update=d**3, direction=d**2)


_INVERSES: dict[type, Callable[[int], InverseCosts]] = {
    inverses.HessianAction: _bfgs,
    inverses.MovingHessianAction: _bfgs_of_a_matrix,
    inverses.HessianActionLBFGS: _limited,
    inverses.BatchInverse: _inverse,
    inverses.OmegaInverse: _inverse,
    inverses.SecantBFGS: _bfgs,
    inverses.SecantLBFGS: _limited,
    inverses.GammaInverse: _inverse,
}


@cache
def _recipe(method: str) -> Recipe:
    """How a method learns its inverses."""
    recipe: Recipe = METHODS[method].build(nn.Linear(1, 1), Settings(lr=1.0, damping=1.0)).recipe
    return recipe


def _inverses(method: str, layer: LayerSize) -> tuple[InverseCosts, InverseCosts]:
    recipe = _recipe(method)
    return _INVERSES[type(recipe.input_inverse)](layer.J), _INVERSES[type(recipe.output_inverse)](layer.I)


def state_numbers(method: str, layers: Sequence[LayerSize]) -> dict[str, float]:
    """How many numbers a method keeps, by part: ``table_4``."""
    total = dict.fromkeys(STATE_PARTS, 0.0)
    for layer in layers:
        for part, number in _state(method, layer).items():
            total[part] += layer.groups * number
    return total


def _state(method: str, layer: LayerSize) -> dict[str, int]:
    size = layer.I * layer.J
    if METHODS[method].first_order:
        return {"∂W": size, "∂W ⊙ ∂W": size if METHODS[method].has_damping else 0}
    A, G = _inverses(method, layer)
    return {"∂W": size, "A, H_A": A.state, "G, H_G": G.state}


def multiplications(method: str, layers: Sequence[LayerSize], m: int, freq: Frequencies) -> dict[str, float]:
    """How many multiplications an iteration takes, by part: ``table_5``."""
    total = dict.fromkeys(TIME_PARTS, 0.0)
    for layer in layers:
        for part, number in _time(method, layer, m, freq).items():
            total[part] += layer.groups * number
    return total


def _time(method: str, layer: LayerSize, m: int, freq: Frequencies) -> dict[str, float]:
    size = layer.I * layer.J
    gradient = m * size * layer.T
    if METHODS[method].first_order:
        # Its damping, ε, is that of the second moment, which SGD-m has not.
        return {"gradient": gradient, "curvature": size if METHODS[method].has_damping else 0, "direction": size}
    A, G = _inverses(method, layer)
    every = freq.T1 if METHODS[method].is_kfac else freq.T
    return {
        "gradient": gradient,
        "additional pass": gradient / every,
        "curvature": m * (A.datum + G.datum) * layer.T / every + (A.update + G.update) / freq.T,
        "direction": layer.I * A.direction + layer.J * G.direction,
    }
