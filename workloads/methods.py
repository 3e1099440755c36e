"""The methods that are compared, ``sec_10``, as data: a name, and how to build the optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import kfqn_ext.optim as zoo
from kfqn_ext.linalg.splits import trace
from kfqn_ext.optim.groups.schedules import burn_in, dense_then
from kfqn_ext.optim.inverses import HessianActionLBFGS
from workloads.adam_2020 import Adam2020

MOMENTUM = 0.9
UpdateFreq = int | Callable[[int], int]


# T(k) = min(20, max(1, k // 20)): early on curvature changes too fast for T = 20.
geometric = burn_in(final=20, growth=20)
# The authors' published codes invert KFAC's factors at each of the first 20 steps.
early = dense_then(every=20, until=20)


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of one run.

    Attributes:
        lr: α.
        damping: λ; ε for Adam; None for SGD with momentum.
        weight_decay: γ, decoupled from the momentum for every method.
        update_freq: T; T₂ for KFAC.
        stats_update_freq: KFAC's T₁.
    """

    lr: float
    damping: float | None = None
    weight_decay: float = 0.0
    update_freq: UpdateFreq = 1
    stats_update_freq: int = 1


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        title: Its name in tables and figures.
        build: (model, settings) ↦ optimizer.
        update_freq: T where the command line names none; None for methods without one.
        has_damping: Whether it takes a damping.
        has_decay: Whether it takes a weight decay.
        samples_targets: Whether its initial curvature needs targets from the predictive distribution.
        is_kfac: Whether it has two frequencies, T₁ of the statistics and T₂ of the inverses, instead of T.
    """

    title: str
    build: Callable[[nn.Module, Settings], Optimizer]
    update_freq: int | None = None
    has_damping: bool = True
    has_decay: bool = True
    samples_targets: bool = False
    is_kfac: bool = False

    @property
    def first_order(self) -> bool:
        return self.update_freq is None

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Those of a cell's fields that change what the method does."""
        has = {
            **{"lr": True, "damping": self.has_damping, "weight_decay": self.has_decay},
            **{"stats_update_freq": self.is_kfac, "update_freq": not self.first_order},
        }
        return tuple(name for name, it_has in has.items() if it_has)


def _common(settings: Settings) -> dict[str, Any]:
    return dict(lr=settings.lr, damping=settings.damping, momentum=MOMENTUM, weight_decay=settings.weight_decay)


def _quasi_newton(class_name: str, model: nn.Module, settings: Settings, **options: Any) -> Optimizer:
    # By name, when it is built: one missing class does not take the others with it.
    return getattr(zoo, class_name).as_printed(
        model, curvature_update_freq=settings.update_freq, **_common(settings), **options
    )


def _ablation(side: str, model: nn.Module, settings: Settings) -> Optimizer:
    """K-BFGS with one cell of its recipe from K-BFGS-20: ``table_8``."""
    recipe = replace(zoo.KBFGS.recipe_as_printed, **{side: getattr(zoo.KBFGS20.recipe, side)})
    return zoo.KroneckerOptimizer(model, recipe=recipe, curvature_update_freq=settings.update_freq, **_common(settings))


def _changed(cells: dict[str, Any], model: nn.Module, settings: Settings) -> Optimizer:
    """K-BFGS with other cells of its recipe that this package offers."""
    recipe = replace(zoo.KBFGS.recipe_as_printed, **cells)
    return zoo.KroneckerOptimizer(model, recipe=recipe, curvature_update_freq=settings.update_freq, **_common(settings))


def _provable(model: nn.Module, settings: Settings) -> Optimizer:
    root = (settings.damping or 0.0) ** 0.5
    return zoo.ProvableKBFGSL(
        model, lr=settings.lr, damping_A=root, damping_G=root, curvature_update_freq=settings.update_freq
    )


def _kfac(recipe: str, model: nn.Module, settings: Settings, **options: Any) -> Optimizer:
    return zoo.KFAC(
        model,
        stats_update_freq=settings.stats_update_freq,
        inverse_update_freq=settings.update_freq,
        recipe=getattr(zoo.KFAC, recipe),
        **_common(settings),
        **options,
    )


def _adam(model: nn.Module, settings: Settings) -> Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=settings.lr, eps=settings.damping, weight_decay=settings.weight_decay
    )


def _adam_2020(model: nn.Module, settings: Settings) -> Optimizer:
    assert settings.damping is not None
    return _decayed(Adam2020(model.parameters(), lr=settings.lr, eps=settings.damping), settings)


def _sgdm(model: nn.Module, settings: Settings) -> Optimizer:
    """W ← W - α(M + γW). torch's own weight_decay would add γW to the gradient, and so to the momentum."""
    return _decayed(torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=MOMENTUM), settings)


def _decayed(optimizer: Optimizer, settings: Settings) -> Optimizer:
    if settings.weight_decay:
        optimizer.register_step_pre_hook(partial(_decay, settings.weight_decay))
    return optimizer


@torch.no_grad()
def _decay(weight_decay: float, optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        torch._foreach_mul_(group["params"], 1.0 - group["lr"] * weight_decay)


METHODS: dict[str, Method] = {
    "kbfgs": Method("K-BFGS", partial(_quasi_newton, "KBFGS"), update_freq=1),
    "kbfgs-dagger": Method("K-BFGS†", partial(_quasi_newton, "KBFGS"), update_freq=20),
    "kbfgsl": Method("K-BFGS(L)", partial(_quasi_newton, "KBFGSL"), update_freq=1),
    "kbfgs20": Method("K-BFGS-20", partial(_quasi_newton, "KBFGS20"), update_freq=1),
    "kbfgsl20": Method("K-BFGS(L)-20", partial(_quasi_newton, "KBFGSL20"), update_freq=1),
    "kfac": Method("KFAC", partial(_kfac, "recipe_stable"), update_freq=20, samples_targets=True, is_kfac=True),
    "kfac-printed": Method(
        "KFAC (algo_1)", partial(_kfac, "recipe_as_printed"), update_freq=20, samples_targets=True, is_kfac=True
    ),
    "adam": Method("Adam", _adam),
    "adam-2020": Method("Adam (code of 2020)", _adam_2020),
    "sgdm": Method("SGD-m", _sgdm, has_damping=False),
    "kbfgs-no-dpdlm": Method("K-BFGS (#1 off)", partial(_ablation, "output_inverse"), update_freq=1),
    "kbfgs-trace": Method(
        "K-BFGS (λ by traces)", partial(_changed, {"split": trace}), update_freq=1, samples_targets=True
    ),
    "kbfgs-limited-a": Method(
        "K-BFGS (L-BFGS on A)", partial(_changed, {"input_inverse": HessianActionLBFGS()}), update_freq=1
    ),
    "kbfgs-rounded": Method(
        "K-BFGS (bfloat16 direction)", partial(_quasi_newton, "KBFGS", direction_dtype=torch.bfloat16), update_freq=1
    ),
    "kbfgs-part": Method(
        "K-BFGS (bfloat16 direction, pairs of a quarter of the batch)",
        partial(_quasi_newton, "KBFGS", direction_dtype=torch.bfloat16, second_pass_fraction=0.25),
        update_freq=1,
    ),
    "kfac-part": Method(
        "KFAC (factors from a quarter of the batch)",
        partial(_kfac, "recipe_stable", second_pass_fraction=0.25),
        update_freq=20,
        samples_targets=True,
        is_kfac=True,
    ),
    "provable": Method("K-BFGS(L), algo_7", _provable, update_freq=1, has_decay=False),
    "kbfgs-moving-a": Method("K-BFGS (#2 off)", partial(_ablation, "input_inverse"), update_freq=1),
}
