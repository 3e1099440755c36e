"""Who is compared: ours, torch's and other packages' optimizers, as a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.problems import Setup
from benchmarks.ready import Ready
from benchmarks.untuned.peers import muon
from kfqn_ext.optim import KBFGS, KFAC, KroneckerOptimizer, OnePassKBFGS, OnePassKFAC
from kfqn_ext.optim.inverses import HessianActionLBFGS, ScaledIdentity
from kfqn_ext.optim.recipe import Recipe, SecondPass, Wide
from workloads.frequencies import set_frequencies
from workloads.workload import DAMPING, LR, NEVER

Shares = Mapping[str, float]


@dataclass(frozen=True)
class Contender:
    """One optimizer.

    Attributes:
        build: Makes it, takes its first step, and says what kinds of steps it takes.
        rows: Rows of the table: the shares of the kinds of steps that make up a mean step.
        package: What ``build`` imports of another package.
    """

    build: Callable[[Setup], Ready]
    rows: Mapping[str, Shares]
    package: str | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps that any row needs."""
        return list(dict.fromkeys(kind for shares in self.rows.values() for kind in shares))


def every(T: int) -> Shares:
    """One step of T is due, the others are not: 20 steps at T = 20, divided by 20, with the noise of neither."""
    return {"ordinary": 1 - 1 / T, "due": 1 / T}


def every_two(T1: int, T2: int) -> Shares:
    """Statistics each T₁ steps, inverses each T₂, which is a multiple of T₁."""
    return {"ordinary": 1 - 1 / T1, "due": 1 / T1 - 1 / T2, "inverse": 1 / T2}


def _first_order(make: Callable[..., Optimizer], setup: Setup) -> Ready:
    optimizer, batch = make(setup.model.parameters(), lr=LR), setup.batch
    optimizer.step(batch)
    return Ready({"ordinary": lambda: optimizer.step(batch)}, optimizer)


def _muon(setup: Setup) -> Ready:
    optimizers, batch = muon(setup.model, lr=LR), setup.batch

    def step() -> None:
        batch()
        for optimizer in optimizers:
            optimizer.step()

    step()
    return Ready({"ordinary": step}, optimizers)


def _kronecker(make: Callable[..., KroneckerOptimizer], setup: Setup) -> Ready:
    optimizer, batch = make(setup.model, lr=LR), setup.batch
    optimizer.step(batch)

    def step(learn_every: int, invert_every: int) -> None:
        set_frequencies(optimizer, learn_every, invert_every)
        optimizer.step(batch)

    steps = {"ordinary": partial(step, NEVER, NEVER), "due": partial(step, 1, NEVER), "inverse": partial(step, 1, 1)}
    start = partial(optimizer.warm_start, [setup.x], progress=False)
    return Ready({"warm start": start, **steps}, optimizer)


def _kbfgs(**options: Any) -> Callable[[Setup], Ready]:
    return partial(_kronecker, partial(KBFGS.as_printed, damping=DAMPING, curvature_update_freq=1, **options))


def _changed(recipe: Recipe, **options: Any) -> Callable[[Setup], Ready]:
    build = partial(KroneckerOptimizer, recipe=recipe, damping=DAMPING, curvature_update_freq=1, **options)
    return partial(_kronecker, build)


def _untuned(cls: Callable[..., KroneckerOptimizer], **options: Any) -> Callable[[Setup], Ready]:
    return partial(_kronecker, partial(cls, curvature_update_freq=1, **options))


_ONE_PASS = replace(KBFGS.recipe_as_printed, output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE)
_FEW_PAIRS = replace(KBFGS.recipe_as_printed, input_inverse=HessianActionLBFGS(history_size=20))


def _kfac(**options: Any) -> Callable[[Setup], Ready]:
    build = partial(KFAC, recipe=KFAC.recipe_stable, damping=DAMPING, stats_update_freq=1, inverse_update_freq=1)
    return partial(_kronecker, partial(build, **options))


CONTENDERS: dict[str, Contender] = {
    "sgdm": Contender(
        partial(_first_order, partial(torch.optim.SGD, momentum=0.9, foreach=True)), {"SGD-m": {"ordinary": 1}}
    ),
    "adam": Contender(partial(_first_order, partial(torch.optim.Adam, foreach=True)), {"Adam": {"ordinary": 1}}),
    "adamw": Contender(partial(_first_order, partial(torch.optim.AdamW, foreach=True)), {"AdamW": {"ordinary": 1}}),
    "muon": Contender(_muon, {"Muon, and AdamW for the rest": {"ordinary": 1}}),
    "onepass": Contender(_untuned(OnePassKBFGS), {"one-pass K-BFGS without tuning, T = 20": every(20)}),
    "onepass-bf16": Contender(
        _untuned(OnePassKBFGS, direction_dtype=torch.bfloat16),
        {
            "one-pass K-BFGS without tuning, T = 20, bfloat16": every(20),
            "one-pass K-BFGS without tuning, T = 1, bfloat16": {"due": 1},
        },
    ),
    "onepass-kfac": Contender(
        partial(_kronecker, partial(OnePassKFAC, stats_update_freq=1, inverse_update_freq=1)),
        {"one-pass KFAC without tuning, T = 20": {"ordinary": 1 - 1 / 20, "inverse": 1 / 20}},
    ),
    "untuned": Contender(_untuned(KBFGS), {"K-BFGS without tuning, T = 20": every(20)}),
    "untuned-bf16": Contender(
        _untuned(KBFGS, direction_dtype=torch.bfloat16),
        {
            "K-BFGS without tuning, T = 20, bfloat16": every(20),
            "K-BFGS without tuning, T = 1, bfloat16": {"due": 1},
        },
    ),
    "kbfgs": Contender(
        _kbfgs(),
        {
            "K-BFGS, T = 20": every(20),
            "K-BFGS, T = 1": {"due": 1},
            "K-BFGS, a step that is not due": {"ordinary": 1},
            "K-BFGS, warm start on one minibatch": {"warm start": 1},
        },
    ),
    "kbfgs-bf16": Contender(
        _kbfgs(direction_dtype=torch.bfloat16),
        {
            "K-BFGS, T = 20, bfloat16": every(20),
            "K-BFGS, T = 1, bfloat16": {"due": 1},
            "K-BFGS, a step that is not due, bfloat16": {"ordinary": 1},
        },
    ),
    "kbfgs-bf16-quarter": Contender(
        _kbfgs(direction_dtype=torch.bfloat16, second_pass_fraction=0.25),
        {
            "K-BFGS, T = 20, bfloat16, curvature from a quarter": every(20),
            "K-BFGS, T = 1, bfloat16, curvature from a quarter": {"due": 1},
        },
    ),
    "kbfgs-one-pass": Contender(
        _changed(_ONE_PASS, direction_dtype=torch.bfloat16, second_pass_fraction=0.25),
        {"K-BFGS, T = 1, bfloat16, a quarter, without an output side": {"due": 1}},
    ),
    "kbfgs-few-pairs": Contender(
        _changed(_FEW_PAIRS),
        {"K-BFGS, T = 20, H_A from 20 pairs": every(20), "K-BFGS, T = 1, H_A from 20 pairs": {"due": 1}},
    ),
    "kbfgs-wide": Contender(
        _changed(replace(KBFGS.recipe_as_printed, wide=Wide())),
        {"K-BFGS, T = 20, H_A from 20 pairs above 4000 inputs": every(20)},
    ),
    "kfac": Contender(_kfac(), {"KFAC (10, 100)": every_two(10, 100)}),
    "kfac-bf16": Contender(_kfac(direction_dtype=torch.bfloat16), {"KFAC (10, 100), bfloat16": every_two(10, 100)}),
    "kfac-bf16-quarter": Contender(
        _kfac(direction_dtype=torch.bfloat16, second_pass_fraction=0.25),
        {"KFAC (10, 100), bfloat16, factors from a quarter": every_two(10, 100)},
    ),
    "curvlinops": Contender(peers.curvlinops_kfac, {"curvlinops' KFAC (10)": every(10)}, "curvlinops"),
    "singd": Contender(peers.singd, {"singd (10)": every(10)}, "singd.optim.optimizer"),
    "asdfghjkl": Contender(peers.asdfghjkl_kfac, {"asdfghjkl's KFAC (10)": every(10)}, "asdl.precondition"),
    "shampoo": Contender(
        peers.shampoo,
        {"pytorch-optimizer's Shampoo (1)": {"due": 1}, "pytorch-optimizer's Shampoo (10)": every(10)},
        "pytorch_optimizer",
    ),
}
