"""What was tried beside the defaults: rows with one idea changed, each of which would have cost the package a cell."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.untuned.entry import Entry, Optimizers, Setting, closure, loop, of_model
from benchmarks.untuned.ours import OURS
from benchmarks.untuned.training import Rate, cosine
from kfqn_ext.extensions import FisherProducts, KBFGSQuantities, KFACFactors
from kfqn_ext.linalg.power_iteration import spectral_norms_
from kfqn_ext.optim import KBFGS, KFAC, Minibatch, OnePassKBFGS, OnePassKFAC
from kfqn_ext.optim.gate import Gate
from kfqn_ext.optim.groups.schedules import burn_in
from kfqn_ext.optim.inverses import FisherAction, FisherInverse, LargestTrace, SecantBFGS, StepHessianAction
from kfqn_ext.optim.inverses.base import Kinds, Measured, Seen, State
from kfqn_ext.optim.lengths import SignalToNoise, Spectral, Step

Schedule = Callable[[int], Rate]


@dataclass(frozen=True)
class Variant:
    """One row of a study.

    Attributes:
        entry: The optimizer.
        setting: What it is built with.
        schedule: Number of steps ↦ the rate at each.
    """

    entry: Entry
    setting: Setting
    schedule: Schedule = cosine


FORMER: Setting = {"lr": 0.4, "damping": 0.3}
"""α and ε of the rows that ideas stand beside: the defaults, until some of these studies had shown better ones."""
_FORMER_T = burn_in(growth=10)
_LATER_T = burn_in(growth=5)
_FORMER_CELLS = {"input_inverse": StepHessianAction(decay=0.0, num_random=0)}
_CLASSES: dict[str, Any] = {
    "onepass": OnePassKBFGS,
    "onepass-kfac": OnePassKFAC,
    "kbfgs": KBFGS,
    "kfac-untuned": KFAC,
}


def _variant(
    name: str,
    T: Callable[[int], int] = _FORMER_T,
    schedule: Schedule = cosine,
    step: Callable[..., Tensor] | None = None,
    cells: Mapping[str, Any] = MappingProxyType({}),
    **setting: float,
) -> Variant:
    make, entry = _CLASSES[name], OURS[name]
    former = {} if make is KFAC else _FORMER_CELLS
    recipe = replace(make.recipe, **{**former, **cells})
    frequencies = [key for key in signature(make).parameters if key.endswith("update_freq")]
    build = of_model(partial(make, recipe=recipe, **dict.fromkeys(frequencies, T)))
    return Variant(replace(entry, build=build, step=step or entry.step), {**FORMER, **setting}, schedule)


def default(name: str, growth: int = 10, **setting: float) -> Variant:
    """A row as it was, or with other numbers; at first T = k / growth."""
    return _variant(name, burn_in(growth=growth), **setting)


def _one_pass(step: Callable[..., Tensor] = loop, **cells: Any) -> Variant:
    return _variant("onepass", step=step, cells=cells)


def _two_pass(step: Callable[..., Tensor] = closure, **cells: Any) -> Variant:
    return _variant("kbfgs", step=step, cells=cells)


def spaced(growth: int, final: int = 20) -> Callable[[int], int]:
    """T that is the largest divisor of the final one that is at most k / growth: updates are so far apart, or less."""
    divisors = [d for d in range(1, final + 1) if final % d == 0]
    return lambda k: max((T for T in divisors if T * growth <= k), default=1)


def learning_at(T: Callable[[int], int], **cells: Any) -> Variant:
    """The default, with another T."""
    return _variant("onepass", T, cells={"input_inverse": StepHessianAction(), **cells}, lr=0.4, damping=0.1)


def averaged(decay: float, num_random: int) -> Variant:
    """H_A with other averages of y, and other numbers of random directions; T = k / 5 at first."""
    return learning_at(_LATER_T, input_inverse=StepHessianAction(decay, num_random))


# ------------------------------------------------------------------ inverses that are computed, not learned


def _inverse_root(matrix: Tensor, damping: Tensor) -> Tensor:
    """(matrix + damping I)^(-1/2)."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + damping.unsqueeze(-1)).rsqrt().unsqueeze(-2)) @ vectors.mT


@dataclass(frozen=True)
class FisherRoot(FisherInverse):
    """H_G = (Γ̂ + ε I)^(-1/2): the root of the inverse."""

    def update_inverse(self, state: State, damping: Tensor) -> None:  # noqa: D102
        state["H_G"] = _inverse_root(state["Gamma"], damping)


@dataclass(frozen=True)
class FisherFromFirst(FisherInverse):
    """Γ̂ starts from that of the first minibatch, not from I."""

    starts_from: ClassVar[Kinds] = (KFACFactors,)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        Gamma = measured[KFACFactors].Gamma
        state["Gamma"] = Gamma / Gamma.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        self.update_inverse(state, damping)


def computed(**cells: Any) -> Variant:
    """The default with other inverses; T = k / 5 at first."""
    learned = {"input_inverse": StepHessianAction(), "output_inverse": FisherAction()}
    return _variant("onepass-kfac", _LATER_T, cells={**learned, **cells}, lr=0.4, damping=0.1)


# ------------------------------------------------------------------ how long a step is


@dataclass(frozen=True)
class Shaped(Spectral):
    """‖ΔW‖₂ = α max(least, d_out / d_in)ᵖ."""

    power: float = 0.5
    least: float = 1.0

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        scales = super().scales(steps, gate)
        assert scales is not None
        shapes = [step.direction.shape[-2] / step.direction.shape[-1] for step in steps]
        changed = [max(self.least, s) ** self.power / max(1.0, math.sqrt(s)) for s in shapes]
        return scales * scales.new_tensor(changed)


@dataclass(frozen=True)
class EachGroup(Spectral):
    """Each group's block of P is given the length that the longest one has else."""

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        scales = super().scales(steps, gate)
        closed = gate.closed(steps[0].direction)
        for step in steps:
            blocks = step.direction.flatten(0, -3).unbind() if step.direction.ndim > 2 else [step.direction]
            vectors = step.state["u"].flatten(0, -2).unbind() if step.direction.ndim > 2 else [step.state["u"]]
            norms = spectral_norms_(blocks, [u.clone() for u in vectors], closed)
            longest = norms.amax()
            for block, norm in zip(blocks, norms, strict=True):
                block.mul_(torch.where(norm > 0, longest / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0.0))
        return scales


def exponent(power: float, least: float = 1.0) -> Variant:
    return _one_pass(length=SignalToNoise(Shaped(power, least)))


def each_group() -> Variant:
    return _one_pass(length=SignalToNoise(EachGroup()))


def by_own_size(most: float, least: float = 0.01) -> Variant:
    """A layer's rate falls where its weight is small: to ``most`` times the weight's size, in units of the step's.

    The size is ‖W‖₂ of a random matrix with that root mean square of entries. ``least`` lets a zero weight begin.
    """

    def build(model: nn.Module) -> Optimizers:
        layers = [list(m.parameters(recurse=False)) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        known = {p for layer in layers for p in layer}
        rest = [p for p in model.parameters() if p not in known]
        groups = [{"params": params} for params in (*layers, rest) if params]
        return (OnePassKBFGS(model, groups, lr=0.4, curvature_update_freq=_LATER_T),)

    def step(optimizers: Optimizers, batch: Minibatch) -> Tensor:
        (optimizer,) = optimizers
        for group in optimizer.param_groups:
            W = group["params"][0]
            if W.ndim > 1 and W in optimizer.state and "H_A" in optimizer.state[W]:
                d_out, d_in = len(W), W[0].numel()
                size = W.detach().square().mean().sqrt().item() * (math.sqrt(d_out) + math.sqrt(d_in))
                group["lr"] *= min(1.0, most * size / max(1.0, math.sqrt(d_out / d_in)) + least)
        return loop(optimizers, batch)

    return Variant(Entry("one pass", build, step=step), {})


# ------------------------------------------------------------------ rates over time


def warm_up(share: float) -> Variant:
    """The rate rises along a straight line in the first steps."""

    def schedule(steps: int) -> Rate:
        return lambda step: cosine(steps)(step) * min(1.0, (step + 1) / max(1.0, share * steps))

    return _variant("onepass", schedule=schedule)


def falling_damping(power: float) -> Variant:
    """ε falls with the rate, to a power."""

    def step(optimizers: Optimizers, batch: Minibatch) -> Tensor:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = group.setdefault("initial_damping", group["damping"])
                group["damping"] = own * max(1e-4, (group["lr"] / group["initial_lr"]) ** power)
        return loop(optimizers, batch)

    return _one_pass(step)


# ------------------------------------------------------------------ what the second pass says of the step


class Reduction:
    """The loss after a step over what its gradient foretold, at the steps whose minibatch is evaluated twice.

    For a quadratic function whose minimum along the step is at its end the ratio is 1/2.
    """

    def __init__(self, key: str, up: float, least: float, most: float) -> None:
        """Let a group's number follow: where the ratio is below 1/4 it is multiplied by ``up``, above 3/4 divided."""
        self.key, self.up, self.least, self.most, self.factor = key, up, least, most, 1.0

    def __call__(self, optimizers: Optimizers, batch: Minibatch) -> Tensor:
        (optimizer,) = optimizers
        own = {id(group): group[self.key] for group in optimizer.param_groups}
        for group in optimizer.param_groups:
            group[self.key] = own[id(group)] * self.factor
        parameters = [p for p in batch.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []

        def watched() -> Tensor:
            loss = batch()
            if not losses:
                gradients.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)
            losses.append(loss)
            return loss

        loss = optimizer.step(watched)
        for group in optimizer.param_groups:
            group[self.key] = own[id(group)]
        if len(losses) > 1:
            foretold = sum(((p.detach() - q) * g).sum() for p, q, g in zip(parameters, before, gradients, strict=True))
            ratio = float((losses[1] - losses[0]) / foretold) if float(foretold) < 0 else -math.inf
            change = self.up if ratio < 0.25 else 1 / self.up if ratio > 0.75 else 1.0
            self.factor = min(self.most, max(self.least, self.factor * change))
        return loss


def reduction(key: str, up: float, least: float, most: float) -> Variant:
    """A new one for each run."""

    former = default("kbfgs")

    def build(model: Any, **setting: float) -> Optimizers:
        (optimizer,) = former.entry.build(model, **setting)
        optimizer.reduction_rule = Reduction(key, up, least, most)  # type: ignore[attr-defined]
        return (optimizer,)

    def step(optimizers: Optimizers, batch: Minibatch) -> Tensor:
        return optimizers[0].reduction_rule(optimizers, batch)  # type: ignore[attr-defined]

    return Variant(Entry("K-BFGS", build, step=step), former.setting)


# ------------------------------------------------------------------ H_G before a normalization


@dataclass(frozen=True)
class FisherWhereBlind(FisherAction):
    """Γ's products, in a layer that was started by secant pairs: H_G begins anew, and counts elsewhere."""

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        for state, value in zip(states, damping, strict=True):
            if "of_fisher" not in state:
                state["of_fisher"] = torch.zeros_like(state["pairs_seen_G"])
                state["H_G"].zero_().diagonal(dim1=-2, dim2=-1).copy_((1 / (1 + value)).unsqueeze(-1))
            state["pairs_seen_G"], state["of_fisher"] = state["of_fisher"], state["pairs_seen_G"]
        super().learn(states, seen, damping)
        for state in states:
            state["pairs_seen_G"], state["of_fisher"] = state["of_fisher"], state["pairs_seen_G"]


@dataclass(frozen=True)
class SecantElseFisher(SecantBFGS):
    """Secant pairs, but before a normalization products with Γ."""

    blind: FisherAction = FisherWhereBlind()
    first: ClassVar[Kinds] = (KBFGSQuantities, FisherProducts)  # when it is looked for such layers, both are needed

    def where_shifts_are_removed(self) -> FisherAction:  # noqa: D102
        return self.blind

    def probe(self, state: State, v: Tensor, step: int) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return self.blind.probe(state, v, step)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:  # noqa: D102
        kept = [(state["H_G"], state["H_G"].clone()) for state in states if "of_fisher" in state]
        super().learn(states, seen, damping)
        for H, before in kept:
            H.copy_(before)


def fisher_where_blind() -> Variant:
    return _two_pass(output_inverse=SecantElseFisher(unit=LargestTrace()))
