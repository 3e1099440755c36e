"""One optimizer = one row of a table, whose cells are rules: for both inverses, the damping, the passes, the step."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from kfqn_ext.extensions import FactorTraces, InputTraces
from kfqn_ext.linalg import splits
from kfqn_ext.optim.inverses import HessianActionLBFGS, InputInverse, Inverse, OutputInverse
from kfqn_ext.optim.inverses.base import Kind
from kfqn_ext.optim.lengths import Computed, SignalToNoise, Spectral, StepLength
from kfqn_ext.optim.numbers import is_count
from kfqn_ext.optim.others import AdamW, Momentum, Others

__all__ = ["Recipe", "SecondPass", "Wide", "untuned"]


class SecondPass(Enum):
    """When a second pass over a minibatch runs, and on which targets."""

    NONE = "none"
    REPEAT_AFTER_STEP = "the data's targets, after the step: what the step did to ∂h̄"
    SAMPLED_AFTER_STEP = "targets sampled from the model, after the step: Fisher factors, algo_1 as printed"
    SAMPLED_BEFORE_STEP = "targets sampled from the model, before the step: Fisher factors that the step uses"

    @property
    def sampled(self) -> bool:
        """Whether targets come from the model's predictive distribution."""
        return self in (SecondPass.SAMPLED_AFTER_STEP, SecondPass.SAMPLED_BEFORE_STEP)

    @property
    def is_before_step(self) -> bool:
        """Whether the step uses what it has measured."""
        return self is SecondPass.SAMPLED_BEFORE_STEP


@dataclass(frozen=True)
class Wide:
    """Another rule for H_A where a layer has many inputs: a dense H_A has the square of their number.

    Attributes:
        above: How many inputs are not yet many.
        rule: That rule; it learns from the first pass alone.
    """

    above: int = 4000
    rule: InputInverse = HessianActionLBFGS(history_size=20)

    def __post_init__(self) -> None:
        """Check both."""
        if not is_count(self.above):
            raise ValueError(f"Invalid above: {self.above!r}. It must be an integer of at least 1: a number of inputs.")
        if self.rule.second:
            raise ValueError(f"Invalid rule: {type(self.rule).__name__} learns from a second pass.")


@dataclass(frozen=True)
class Recipe:
    """What distinguishes one member of the family from another.

    Attributes:
        input_inverse: How H_A is learned.
        output_inverse: How H_G is learned.
        split: (λ, what is known of the factors) ↦ (λ_A, λ_G).
        second_pass: When the second pass runs and on which targets.
        length: How long a layer's step is along H_G M H_A.
        others: What moves parameters without a Kronecker block.
        wide: What learns H_A in place of ``input_inverse`` where a layer has many inputs; None for no such layers.
    """

    input_inverse: InputInverse
    output_inverse: OutputInverse
    split: splits.Split = splits.spatial
    second_pass: SecondPass = SecondPass.REPEAT_AFTER_STEP
    length: StepLength = Computed()
    others: Others = Momentum()
    wide: Wide | None = None

    def __post_init__(self) -> None:
        """Check that what a cell needs is measured."""
        rules = [type(rule).__name__ for rule in self._rules if rule.second]
        if rules and self.second_pass is SecondPass.NONE:
            raise ValueError(
                f"Invalid recipe: {' and '.join(rules)} learn from a second pass, and second_pass is NONE. Give the "
                "second pass, or rules that need none: replace(recipe, output_inverse=ScaledIdentity(), "
                "second_pass=SecondPass.NONE)."
            )
        if self.wide is not None and self.second_pass.sampled:
            raise ValueError("Invalid recipe: where targets are sampled, both inverses come from one pass; wide=None.")
        if not splits.reads_traces(self.split):
            self.split(1.0, splits.Balance(1.0))  # raises where it reads traces all the same

    def at(self, d_in: int) -> "Recipe":
        """The row for a layer with so many inputs; the same object at each call."""
        return self if self.wide is None or d_in <= self.wide.above else _of_wide(self)

    @property
    def first(self) -> frozenset[Kind]:
        """Extensions that measure the first pass of a step that is due."""
        return frozenset((*self.input_inverse.first, *self.output_inverse.first, *self._traces))

    @property
    def second(self) -> frozenset[Kind]:
        """Extensions that measure the second pass."""
        return frozenset((*self.input_inverse.second, *self.output_inverse.second))

    @property
    def starts_from(self) -> frozenset[Kind]:
        """Extensions whose quantities make a layer's initial curvature."""
        return frozenset((*self.input_inverse.starts_from, *self.output_inverse.starts_from, *self._traces))

    @property
    def starts_in_second_pass(self) -> bool:
        """Whether the initial curvature needs sampled targets, as Γ does."""
        return self.second_pass.sampled and bool(self.starts_from & self.second)

    @property
    def recomputes(self) -> bool:
        """Whether an inverse is recomputed from time to time, as one that is learned pair by pair is not."""
        return any(type(rule).update_inverse is not Inverse.update_inverse for rule in self._rules)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of it in a state; none where a rule does not tell."""
        rules = [rule for rule in self._rules if type(rule).update_inverse is not Inverse.update_inverse]
        return tuple(name for rule in rules for name in rule.recomputed) if all(r.recomputed for r in rules) else ()

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of matrices in a state that are learned pair by pair."""
        return tuple(name for rule in self._rules for name in rule.learned)

    @property
    def _rules(self) -> tuple[Inverse, Inverse]:
        return self.input_inverse, self.output_inverse

    @property
    def _traces(self) -> tuple[Kind, ...]:
        """What measures the traces, where the split needs them and the rules do not keep the factors themselves."""
        read: tuple[Inverse, ...] = (self.input_inverse,) if self.output_inverse.in_own_units else self._rules
        known = all(type(rule).trace is not Inverse.trace for rule in read)
        kind = InputTraces if self.output_inverse.in_own_units else FactorTraces
        return (kind,) if splits.reads_traces(self.split) and not known else ()


@cache  # layers learn together by the identity of their row
def _of_wide(recipe: Recipe) -> Recipe:
    assert recipe.wide is not None
    return replace(recipe, input_inverse=recipe.wide.rule, wide=None)


def untuned(recipe: Recipe) -> Recipe:
    """A recipe with what makes one rate and one damping fit all: its inverses and passes stay as they are.

    The damping counts in units of each factor's mean eigenvalue, the length of a layer's step is set, and parameters
    without a block move as with AdamW.

    Args:
        recipe: A recipe whose inverses and second pass are to stay.

    Returns:
        The changed recipe.
    """
    return replace(recipe, split=splits.relative, length=SignalToNoise(Spectral()), others=AdamW())
