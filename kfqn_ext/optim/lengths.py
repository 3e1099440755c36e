"""How long a layer's step is along its direction P = H_G M H_A.

The paper's step is αP: its length follows from H_A, H_G and M, and so from the scale of the loss and from how well
curvature is known. A length can also be *set*: then α says how long the step is, and P only where it goes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.linalg.power_iteration import spectral_norms_, start_vector
from kfqn_ext.optim.gate import Gate
from kfqn_ext.optim.inverses.base import State

__all__ = ["Computed", "MatchRMSAdamW", "SignalToNoise", "Spectral", "Step", "StepLength"]

# Of a power iteration at the first step, which has no vector of the step before.
_FIRST_ITERATIONS = 8


@dataclass(frozen=True)
class Step:
    """A layer's step, before its length is set.

    Attributes:
        direction: P, [*B, d_out, d_in].
        momentum: M, [*B, d_out, d_in].
        grad_norms: ‖∂p‖_F of each parameter in W, of the minibatch, [].
        beta: β of the momentum.
        state: The layer's state, in which a rule may keep tensors.
    """

    direction: Tensor
    momentum: Tensor
    grad_norms: Sequence[Tensor]
    beta: float
    state: State


class StepLength:
    """A rule for the length of steps, without state of its own."""

    @property
    def is_set(self) -> bool:
        """Whether the length is set, and does not follow from P's."""
        return True

    def start(self, state: State, like: Tensor) -> None:
        """Make what the rule keeps in a layer's state; ``like`` is an M, [*B, d_out, d_in]."""

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:
        """What each direction is multiplied with, beside α.

        Args:
            steps: Those of L layers of one device and dtype.
            gate: Says whether the minibatch is finite; where it is not, states stay as they are.

        Returns:
            [L], or None for 1.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Computed(StepLength):
    """The step is αP, ``algo_8``."""

    @property
    def is_set(self) -> bool:  # noqa: D102
        return False

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        return None


@dataclass(frozen=True)
class Spectral(StepLength):
    """‖ΔW‖₂ = α max(1, √(d_out / d_in)): how far a layer's outputs move does not depend on its width.

    From Yang, Simon and Bernstein, "A Spectral Condition for Feature Learning" (2023), with the maximum that
    ``torch.optim.Muon`` has. A power iteration that goes on from step to step estimates ‖P‖₂: two products with a
    vector. The estimate is never above ‖P‖₂. While P changes fast it may be well below, and the step as much longer.
    """

    def start(self, state: State, like: Tensor) -> None:  # noqa: D102
        state["u"] = start_vector(like.flatten(0, -2)[0], like.shape[:-2])

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        wanted = [max(1.0, sqrt(step.direction.shape[-2] / step.direction.shape[-1])) for step in steps]
        return _times(self._norms(steps, gate.closed(steps[0].direction)), wanted, gate)

    def _norms(self, steps: Sequence[Step], closed: Tensor) -> Tensor:
        """‖P‖₂ of each layer, [L]; blocks stand beside blocks of the same shape alone."""
        akin: defaultdict[Any, list[int]] = defaultdict(list)
        for i, step in enumerate(steps):
            akin[tuple(step.direction.shape) if step.direction.ndim > 2 else ()].append(i)
        if len(akin) == 1:
            return self._norms_of_kin(steps, closed)
        found: dict[int, Tensor] = {}
        for places in akin.values():
            norms = self._norms_of_kin([steps[i] for i in places], closed)
            found.update(zip(places, norms.unbind(), strict=True))
        return torch.stack([found[i] for i in range(len(steps))])

    def _norms_of_kin(self, steps: Sequence[Step], closed: Tensor) -> Tensor:
        new = [step for step in steps if "u" not in step.state]
        for step in new:
            self.start(step.state, step.momentum)
        if new:
            first = [step.direction for step in new], [step.state["u"] for step in new]
            spectral_norms_(*first, closed, _FIRST_ITERATIONS)
        return spectral_norms_([step.direction for step in steps], [step.state["u"] for step in steps], closed)


@dataclass(frozen=True)
class MatchRMSAdamW(StepLength):
    """Entries of ΔW have the root mean square 0.2 α, like those of AdamW's steps.

    ``torch.optim.Muon`` has it as ``adjust_lr_fn="match_rms_adamw"``. In a wider layer equal entries make a larger
    step, so that α has to fall with the width.

    Attributes:
        rms: That number.
    """

    rms: float = 0.2

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        directions = [step.direction for step in steps]
        norms = torch.stack(torch._foreach_norm(directions))
        return _times(norms, [self.rms * sqrt(P.numel()) for P in directions], gate)


@dataclass(frozen=True)
class SignalToNoise(StepLength):
    """Shorten another rule's steps where gradients disagree: by ρᵖ with ρ = ‖mean of gradients‖ / √(mean of ‖g‖²).

    The first mean is the momentum's, the second one has a decay of its own; both are corrected for their start at zero.
    ρ ≤ 1 is Adam's m / √v of a layer as a whole, as in NovoGrad (Ginsburg and others, 2019). It falls where gradients
    point to and fro, as they do once a step of that length jumps over the minimum.

    Attributes:
        length: The other rule.
        power: p.
        decay: Of the mean of ‖g‖².
    """

    length: StepLength = field(default_factory=Spectral)
    power: float = 0.5
    decay: float = 0.95

    @property
    def is_set(self) -> bool:  # noqa: D102
        return self.length.is_set

    def start(self, state: State, like: Tensor) -> None:  # noqa: D102
        self.length.start(state, like)
        self._start_signal(state, like)

    def _start_signal(self, state: State, like: Tensor) -> None:
        state["signal"] = like.new_zeros(3)  # mean of ‖g‖², its weight so far, and that of M

    def scales(self, steps: Sequence[Step], gate: Gate) -> Tensor | None:  # noqa: D102
        for step in steps:
            if "signal" not in step.state:
                self._start_signal(step.state, step.momentum)
        ratio = self._ratios(steps, gate).pow(self.power)
        scales = self.length.scales(steps, gate)
        return ratio if scales is None else ratio * scales

    def _ratios(self, steps: Sequence[Step], gate: Gate) -> Tensor:
        """ρ of each layer, [L]."""
        M = torch.stack(torch._foreach_norm([step.momentum for step in steps]))
        kept = [step.state["signal"] for step in steps]
        before = torch.stack(kept)
        square, weight, weight_of_M = before.unbind(1)
        squares = _sums_of_squares([step.grad_norms for step in steps], M)
        after = torch.stack(
            (
                torch.lerp(squares, square, self.decay),
                torch.lerp(torch.ones_like(weight), weight, self.decay),
                gate.scaled(weight_of_M, [step.beta for step in steps]) + 1.0,
            ),
            dim=1,
        )
        after = gate.kept(before, after)
        torch._foreach_copy_(kept, after.unbind())
        square, weight, weight_of_M = after.clamp(min=torch.finfo(M.dtype).tiny).unbind(1)
        return (M / weight_of_M / (square / weight).sqrt()).clamp(max=1.0)


def _sums_of_squares(norms: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
    """Of each layer's parameters, [L]: in as few operations for many layers as for one."""
    columns = list(zip_longest(*norms, fillvalue=norms[0][0].new_zeros(())))  # all weights, all biases
    stacked = torch.stack([norm for column in columns for norm in column]).to(like)
    return stacked.square().view(len(columns), len(norms)).sum(0)


def _times(norms: Tensor, wanted: Sequence[float], gate: Gate) -> Tensor:
    """What gives each norm the value that it is to have; zero for a norm of zero."""
    inverse = norms.clamp(min=torch.finfo(norms.dtype).tiny).reciprocal()
    return gate.scaled(torch.where(norms > 0, inverse, 0.0), wanted)
