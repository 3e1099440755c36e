"""Every row of the table, once: its name, how tests build it, and what the suites ask of it.

A suite about all rows takes ``FAMILY``; one about a part of them takes ``rows`` with the property that they share. A
new public class or rule without an entry here fails ``test_family.py``. Options are no rows: ``OPTIONS`` are put on top
of rows that take them, ``varied``.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfqn_ext.extensions import InputGram, InputQuantities, InputTraces
from kfqn_ext.linalg import double_damping_2020, splits
from kfqn_ext.optim import (
    KBFGS,
    KBFGS20,
    KBFGSL,
    KBFGSL20,
    KFAC,
    KroneckerOptimizer,
    OnePassKBFGS,
    OnePassKFAC,
    ProvableKBFGSL,
    running_mean,
)
from kfqn_ext.optim.inverses import (
    FisherAction,
    FisherInverse,
    GammaInverse,
    HessianAction,
    HessianActionLBFGS,
    MovingHessianAction,
    OmegaInverse,
    ScaledIdentity,
    SecantBFGS,
    SecantLBFGS,
    StepHessianAction,
)
from kfqn_ext.optim.others import AdamW, Momentum
from kfqn_ext.optim.recipe import Recipe, SecondPass


@dataclass(frozen=True)
class Member:
    """One row.

    Attributes:
        build: The class, or what makes the optimizer with its keywords.
        fixed: Keywords that the row always gets.
        T: What it calls the frequency at which it learns.
        given_damping: Whether it takes λ_A and λ_G in place of λ.
    """

    build: Callable[..., KroneckerOptimizer]
    fixed: dict[str, Any] = field(default_factory=dict)
    T: str = "curvature_update_freq"
    given_damping: bool = False

    def make(self, model: nn.Module, *, lr: Any, damping: Any = 1.0, T: Any = 1, **options: Any) -> KroneckerOptimizer:
        """Build it, whatever it calls things; options that it does not have are an error, as for a user."""
        options = {**self.fixed, **options, self.T: T}
        if self.given_damping:
            options = {"damping_A": damping**0.5, "damping_G": damping**0.5, **options}
        else:
            options["damping"] = damping
        return self.build(model, lr=lr, **options)

    @property
    def keywords(self) -> dict[str, inspect.Parameter]:
        """Of its constructor, with those that it shares with others."""
        if not isinstance(self.build, type):
            return dict(inspect.signature(self.build).parameters)
        own = inspect.signature(self.build.__init__).parameters  # type: ignore[misc]
        shares = any(p.kind is p.VAR_KEYWORD for p in own.values())
        return dict(inspect.signature(self.build).parameters if shares else own)

    def takes(self, *options: str) -> bool:
        """Whether it has all of these keywords, and does not refuse them: a cap is for lengths that are computed."""
        return self.keywords.keys() >= set(options) and not ("step_cap" in options and self.sets_length)

    def taken(self, **options: Any) -> dict[str, Any]:
        """Those of these keywords that it has."""
        return {key: value for key, value in options.items() if self.takes(key)}

    @cached_property
    def recipe(self) -> Recipe:
        return self.make(nn.Linear(1, 1), lr=0.0).recipe

    @property
    def has_defaults(self) -> bool:
        """Whether a user may leave out its learning rate and its damping."""
        return all(p.default is not p.empty for name, p in self.keywords.items() if name in ("lr", "damping"))

    @property
    def samples(self) -> bool:
        """Whether its second pass is on targets that are sampled: rows of Fisher factors."""
        return self.recipe.second_pass.sampled

    @property
    def learns_first(self) -> bool:
        """Whether a minibatch enters the curvature before the step that it causes."""
        return self.recipe.second_pass is SecondPass.SAMPLED_BEFORE_STEP

    @property
    def repeats(self) -> bool:
        """Whether its second pass repeats the first."""
        return self.recipe.second_pass is SecondPass.REPEAT_AFTER_STEP

    @property
    def passes(self) -> int:
        """How often it runs a minibatch when curvature is due."""
        return 1 if self.recipe.second_pass is SecondPass.NONE else 2

    @property
    def action_A(self) -> bool:
        """Whether H_A is learned pair by pair."""
        return isinstance(self.recipe.input_inverse, HessianAction | HessianActionLBFGS)

    @property
    def directions_A(self) -> int:
        """Along how many directions H_A learns in a step."""
        rule = self.recipe.input_inverse
        return 2 + rule.num_random if isinstance(rule, StepHessianAction) else int(self.action_A)

    def pairs_of_A(self, steps: int) -> int:
        """How many pairs H_A learns from in so many steps, each due: none in a first one that has inverted its A."""
        inverted = isinstance(self.recipe.input_inverse, HessianAction)
        moves = isinstance(self.recipe.input_inverse, MovingHessianAction)
        return self.directions_A * (steps - (inverted and not moves))

    @property
    def learned_A(self) -> str:
        """Where its state has what H_A has learned."""
        return "Omega" if self.samples else "pairs_A" if self.pairs_A else "H_A"

    @property
    def pairs_A(self) -> bool:
        """Whether H_A is kept as pairs."""
        return isinstance(self.recipe.input_inverse, HessianActionLBFGS)

    @property
    def secant_G(self) -> bool:
        """Whether H_G is learned from what steps change."""
        return isinstance(self.recipe.output_inverse, SecantBFGS | SecantLBFGS)

    @property
    def action_G(self) -> bool:
        """Whether H_G is learned from products with Γ."""
        return isinstance(self.recipe.output_inverse, FisherAction)

    @property
    def computed(self) -> bool:
        """Whether H_A and H_G are computed, from moving averages of factors, and no pairs count."""
        return self.samples or isinstance(self.recipe.output_inverse, FisherInverse)

    @property
    def sets_length(self) -> bool:
        """Whether α says how long a layer's step is, and P only where it goes."""
        return self.recipe.length.is_set

    def rate(self, lr: float, step: Tensor, P: Tensor) -> float:
        """What P was multiplied with in a step: α, or what their lengths say where α sets the length."""
        return float(step.norm() / P.norm()) if self.sets_length else lr

    @property
    def others_by_momentum(self) -> bool:
        """Whether parameters without a block move along their momentum."""
        return isinstance(self.recipe.others, Momentum)

    @property
    def reads_traces(self) -> bool:
        """Whether λ_A and λ_G move with the traces of the factors."""
        return splits.reads_traces(self.recipe.split)

    @property
    def relative(self) -> bool:
        """Whether the damping is ε, in units of each factor's mean eigenvalue."""
        return splits.is_relative(self.recipe.split)

    @property
    def starts_from_inputs(self) -> bool:
        """Whether a warm start needs the layers' inputs alone, and no backward pass."""
        return not self.samples and self.recipe.starts_from <= {InputGram, InputQuantities, InputTraces}

    @property
    def limited(self) -> bool:
        """Whether an inverse is kept as pairs."""
        return any(hasattr(rule, "history_size") for rule in (self.recipe.input_inverse, self.recipe.output_inverse))

    def with_memory(self, p: int) -> "Member":
        """The row with p pairs in each inverse that is kept as pairs."""
        if not self.limited:
            return self
        if self.takes("history_size"):
            return replace(self, fixed={**self.fixed, "history_size": p})
        sides = ("input_inverse", "output_inverse")
        rules = {side: getattr(self.recipe, side) for side in sides}
        kept = {side: replace(rule, history_size=p) for side, rule in rules.items() if hasattr(rule, "history_size")}
        return replace(self, fixed={**self.fixed, "recipe": replace(self.recipe, **kept)})

    def without_eps(self) -> "Member":
        """The row without AdamW's ε, beside which the unit of the loss counts."""
        if not isinstance(self.recipe.others, AdamW):
            return self
        others = replace(self.recipe.others, eps=1e-300)
        return replace(self, fixed={**self.fixed, "recipe": replace(self.recipe, others=others)})


def cell(**changed: Any) -> Member:
    """K-BFGS with changed cells of its recipe."""
    return Member(KroneckerOptimizer, {"recipe": replace(KBFGS.recipe_as_printed, **changed)})


def kfac(recipe: Recipe, **fixed: Any) -> Member:
    return Member(KFAC, {"recipe": recipe, "inverse_update_freq": 1, "momentum": 0.9, **fixed}, T="stats_update_freq")


FAMILY: dict[str, Member] = {
    "KBFGS": Member(KBFGS.as_printed),
    "KBFGSL": Member(KBFGSL.as_printed, {"history_size": 2}),  # in compact form
    "KBFGSL, many pairs": Member(KBFGSL.as_printed, {"history_size": 10}),  # formed where d ≤ 20
    "KBFGS20": Member(KBFGS20),
    "KBFGSL20": Member(KBFGSL20, {"history_size": 2}),
    "ProvableKBFGSL": Member(ProvableKBFGSL, {"history_size": 3}, given_damping=True),
    "KFAC": kfac(KFAC.recipe_stable),
    "KFAC as printed": kfac(KFAC.recipe_as_printed),
    "KFAC, adaptive π": kfac(replace(KFAC.recipe_stable, split=splits.trace)),
    "KFAC, running mean": kfac(  # whose weights are a function of the step
        replace(
            KFAC.recipe_stable, input_inverse=OmegaInverse(running_mean()), output_inverse=GammaInverse(running_mean())
        )
    ),
    "#1 off": cell(output_inverse=SecantBFGS(pair_damping=double_damping_2020)),
    "#2 off": cell(input_inverse=MovingHessianAction()),
    "L-BFGS for H_A": cell(input_inverse=HessianActionLBFGS(history_size=2)),
    "L-BFGS for both": cell(
        input_inverse=HessianActionLBFGS(history_size=2), output_inverse=SecantLBFGS(history_size=2)
    ),
    "trace split": cell(split=splits.trace),
    "one pass": cell(output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE),
    "one pass, L-BFGS for H_A": cell(
        input_inverse=HessianActionLBFGS(history_size=2), output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE
    ),
    "KBFGS, untuned": Member(KBFGS),
    "KBFGSL, untuned": Member(KBFGSL, {"history_size": 2}),
    "OnePassKBFGS": Member(OnePassKBFGS),
    "OnePassKFAC": Member(OnePassKFAC, {"inverse_update_freq": 1}, T="stats_update_freq"),
    "KFAC, untuned": Member(KFAC, {"inverse_update_freq": 1}, T="stats_update_freq"),
}
ONE_PER_CLASS = ("KBFGS", "KBFGSL", "KBFGS20", "KBFGSL20", "ProvableKBFGSL", "KFAC", "OnePassKBFGS", "OnePassKFAC")


def rows(holds: Callable[[Member], bool]) -> list[str]:
    """The rows that have a property."""
    return [name for name, member in FAMILY.items() if holds(member)]


def classes(holds: Callable[[Member], bool] = lambda member: True) -> list[str]:
    """One row of each class, of those that have a property: for what the class is asked, and its rules are not."""
    return [name for name in rows(holds) if name in ONE_PER_CLASS]


def firsts(kind: Callable[[Member], Hashable], names: Sequence[str] = tuple(FAMILY)) -> list[str]:
    """The first row of each kind."""
    found: dict[Hashable, str] = {}
    for name in names:
        found.setdefault(kind(FAMILY[name]), name)
    return [*found.values()]


def one_per(kind: Callable[[Member], Hashable], names: Sequence[str] = tuple(FAMILY)) -> list[Any]:
    """Rows as parameters of a test; of each kind, those after the first are slow."""
    quick = firsts(kind, names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16 direction": {"direction_dtype": torch.bfloat16},
    "step cap": {"step_cap": 1.0},
    "weight decay": {"weight_decay": 0.1},
    "rate a tensor": {"lr": torch.tensor(0.05, dtype=torch.float64), "weight_decay": 0.1},
    "curvature from a part": {"second_pass_fraction": 0.5},
}


def varied(*without: str, names: Sequence[str] = tuple(FAMILY)) -> list[Any]:
    """(row, option): every row as it is, and with each option that it takes, but for these.

    An option has to do with the step and its passes, hardly with what a cell of the recipe learns: a row that repeats
    its pass and one that samples will do, one that sets lengths, and others with an option are slow.
    """
    quick = {*firsts(lambda member: member.samples), *firsts(lambda member: member.sets_length)}
    found = [pytest.param(name, "plain") for name in names]
    for option in [option for option in OPTIONS if option not in ("plain", *without)]:
        for name in [name for name in names if FAMILY[name].takes(*OPTIONS[option])]:
            found.append(pytest.param(name, option, marks=() if name in quick else pytest.mark.slow))
    return found
