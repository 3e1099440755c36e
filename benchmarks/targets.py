"""What was aimed at, beside what a plain prototype of K-BFGS and the best one of it took."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Target:
    """One number to reach.

    Attributes:
        what: What it is.
        problem: Where it is measured.
        value: Finds it among a problem's results; None where it was not measured.
        limit: It should be no more.
        plain: The plain prototype's.
        best: The best prototype's; None where there was one prototype only.
    """

    what: str
    problem: str
    value: Callable[[dict[str, Any]], float | None]
    limit: float
    plain: str
    best: str = ""


def row(results: dict[str, Any], title: str) -> dict[str, Any]:
    """A row of a problem's results; an empty one where it is missing."""
    return next((row for row in results["rows"] if row["row"] == title), {})


def _time(title: str, results: dict[str, Any]) -> float | None:
    return row(results, title).get("time")


def _state(title: str, results: dict[str, Any]) -> float | None:
    ours, adam = (row(results, name).get("state") for name in (title, "Adam"))
    return ours / adam if ours and adam else None


def _extraction(title: str, results: dict[str, Any]) -> float | None:
    value = results["extraction"].get(title)
    return value if isinstance(value, float) else None


def _step(what: str, problem: str, title: str, limit: float, plain: str, best: str = "") -> Target:
    return Target(f"{what}: {title}", problem, partial(_time, title), limit, plain, best)


_T20, _T1 = "K-BFGS, T = 20", "K-BFGS, T = 1"
# The prototype's way where every convolution is followed by BatchNorm.
_ONE_PASS = f"{_T1}, bfloat16, a quarter, without an output side"
TARGETS = [
    _step("ResNet32", "resnet32", f"{_T20}, bfloat16", 1.04, "1.05", "1.03"),
    _step("ResNet32", "resnet32", f"{_T1}, bfloat16", 1.20, "1.93", "1.17"),
    _step("ResNet32", "resnet32", _ONE_PASS, 1.20, "1.93", "1.17"),
    _step("VGG16", "vgg16", f"{_T20}, bfloat16", 1.20, "2.01", "1.19"),
    _step("VGG16", "vgg16", f"{_T1}, bfloat16", 1.30, "2.79", "1.28"),
    _step("VGG16", "vgg16", _ONE_PASS, 1.30, "2.79", "1.28"),
    _step("MNIST autoencoder", "autoencoder", f"{_T20}, bfloat16", 1.18, "1.60", "1.17"),
    _step("MNIST autoencoder", "autoencoder", f"{_T20}, bfloat16, curvature from a quarter", 1.18, "1.60", "1.17"),
    _step("MNIST autoencoder", "autoencoder", f"{_T1}, bfloat16, curvature from a quarter", 1.45, "2.36", "1.46"),
    _step("ResNet32, float32", "resnet32", _T20, 1.04, "1.05", "1.03"),
    _step("VGG16, float32", "vgg16", _T20, 1.50, "2.01", "1.48"),
    _step("MNIST autoencoder, float32", "autoencoder", _T20, 1.30, "1.60", "1.26"),
    _step("ResNet32", "resnet32", "KFAC (10, 100), bfloat16", 1.20, "1.59"),
    _step("ResNet32", "resnet32", "KFAC (10, 100), bfloat16, factors from a quarter", 1.20, "1.59"),
    _step("VGG16", "vgg16", "KFAC (10, 100), bfloat16", 1.60, "2.76"),
    Target(
        "ResNet32: forward-backward with KBFGSQuantities(probe=…) ÷ plain",
        "resnet32",
        partial(_extraction, "KBFGSQuantities(probe=…)"),
        1.12,
        "1.2 to 1.4",
        "1.16",
    ),
    Target("VGG16: state of K-BFGS ÷ Adam's", "vgg16", partial(_state, _T20), 2.5, "4.8"),
    Target("VGG16: the same, H_A from 20 pairs", "vgg16", partial(_state, f"{_T20}, H_A from 20 pairs"), 2.5, "4.8"),
    _step("VGG16", "vgg16", "K-BFGS, warm start on one minibatch", 8.0, "18.5"),
]
