"""``table_4`` and ``table_5``, with 1 for every constant that the O(·) hides."""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.paper.costs.workload import LayerSize

PAIRS = 100  # p
STATE_PARTS = ("∂W", "∂W ⊙ ∂W", "A, H_A", "G, H_G")
TIME_PARTS = ("gradient", "additional pass", "curvature", "direction")


@dataclass(frozen=True)
class Frequencies:
    """T of K-BFGS; T₁ and T₂ of KFAC."""

    T: int = 1
    T1: int = 1


def state_numbers(method: str, layers: Sequence[LayerSize]) -> dict[str, float]:
    """How many numbers a method keeps, by part: ``table_4``."""
    total = dict.fromkeys(STATE_PARTS, 0.0)
    for layer in layers:
        for part, number in _state(method, layer.I, layer.J).items():
            total[part] += layer.groups * number
    return total


def _state(method: str, I: int, J: int) -> dict[str, float]:  # noqa: E741
    if method == "sgdm":
        return {"∂W": I * J}
    if method == "adam":
        return {"∂W": I * J, "∂W ⊙ ∂W": I * J}
    G = PAIRS * I if method.startswith("kbfgsl") else I * I
    return {"∂W": I * J, "A, H_A": J * J, "G, H_G": G}


def multiplications(method: str, layers: Sequence[LayerSize], m: int, freq: Frequencies) -> dict[str, float]:
    """How many multiplications an iteration takes, by part: ``table_5``."""
    total = dict.fromkeys(TIME_PARTS, 0.0)
    for layer in layers:
        for part, number in _time(method, layer.I, layer.J, layer.T, m, freq).items():
            total[part] += layer.groups * number
    return total


def _time(method: str, I: int, J: int, locations: int, m: int, freq: Frequencies) -> dict[str, float]:  # noqa: E741
    gradient = m * I * J * locations
    if method == "sgdm":
        return {"gradient": gradient, "direction": I * J}
    if method == "adam":
        return {"gradient": gradient, "curvature": I * J, "direction": I * J}
    if method.startswith("kfac"):
        statistics = m * (J**2 + I**2) * locations
        return {
            "gradient": gradient,
            "additional pass": gradient / freq.T1,
            "curvature": statistics / freq.T1 + (J**3 + I**3) / freq.T,
            "direction": I * J**2 + I**2 * J,
        }
    # K-BFGS-20 needs A itself, and so J² where K-BFGS needs J.
    product = J**2 if "20" in method or method == "kbfgs-moving-a" else J
    output_side = PAIRS * I if method.startswith("kbfgsl") else I**2
    output_step = PAIRS * I * J if method.startswith("kbfgsl") else I**2 * J
    return {
        "gradient": gradient,
        "additional pass": gradient / freq.T,
        "curvature": (m * product * locations + J**2 + m * I * locations + output_side) / freq.T,
        "direction": I * J**2 + output_step,
    }
