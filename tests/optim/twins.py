"""The dense twin of every row of the table: what ``tests.reference`` makes of its cells, written from the paper."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference as ref
from tests.optim.untuned_twins import Untuned, UntunedKFAC

F64 = torch.float64


def identity_like(H: Tensor) -> Tensor:
    return torch.eye(H.shape[-1], dtype=H.dtype).expand_as(H)


@dataclass
class LimitedA(ref.ReferenceKBFGS):
    """H_A by L-BFGS from I / λ_A and the last pairs of eq_1."""

    _: KW_ONLY
    memory_A: int = 2

    def initial(self, layer: ref.Layer, A: Tensor) -> ref.LayerState:
        st = super().initial(layer, A)
        st.H_A = identity_like(st.H_A) / st.lambda_A
        st.pairs_A = []  # type: ignore[attr-defined]
        return st

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        s = torch.einsum("...ij,...j->...i", st.H_A, layer.a_bar)
        y = torch.einsum("...ij,...j->...i", layer.A, s) + st.lambda_A * s
        st.pairs_A = [*st.pairs_A, (s, y)][-self.memory_A :]
        st.A, st.H_A = layer.A, ref.lbfgs(identity_like(st.H_A) / st.lambda_A, st.pairs_A)


class TraceSplit(ref.ReferenceKBFGS):
    """line_11's π for K-BFGS: mean eigenvalues of A and of the empirical Fisher factor, as moving averages."""

    def initial(self, layer: ref.Layer, A: Tensor) -> ref.LayerState:
        st: Any = super().initial(layer, A)
        st.power_A, st.power_G = self.power(A), self.power(layer.Gamma)
        self.split_damping(st)
        st.H_A = ref.damped_inverse(A, st.lambda_A)
        st.H_G = st.H_G0 = identity_like(st.H_G) / st.lambda_G[..., None, None]
        return st

    @staticmethod
    def power(factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).mean(-1)

    def split_damping(self, st: Any) -> None:
        pi = (st.power_A / st.power_G).sqrt()
        st.lambda_A, st.lambda_G = pi * self.damping**0.5, self.damping**0.5 / pi

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        st.power_A = 0.9 * st.power_A + 0.1 * self.power(layer.A)
        st.power_G = 0.9 * st.power_G + 0.1 * self.power(layer.Gamma)
        self.split_damping(st)
        s = torch.einsum("...ij,...j->...i", st.H_A, layer.a_bar)
        y = torch.einsum("...ij,...j->...i", layer.A, s) + st.lambda_A[..., None] * s
        st.A, st.H_A = layer.A, ref.bfgs(st.H_A, s, y)

    def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
        st.s_G = 0.9 * st.s_G + 0.1 * (second.h_bar - first.h_bar)
        st.y_G = 0.9 * st.y_G + 0.1 * (second.dh_bar - first.dh_bar)
        s = ref.powell(st.s_G, st.y_G, st.H_G, self.mu1)
        y = st.y_G + st.lambda_G[..., None] * s
        if self.memory is None:
            st.H_G = ref.bfgs(st.H_G, s, y)
        else:  # the pairs keep the damping of their time, the identity that they start from has today's
            st.pairs = [*st.pairs, (s, y)][-self.memory :]
            st.H_G = ref.lbfgs(identity_like(st.H_G) / st.lambda_G[..., None, None], st.pairs)


@dataclass
class UntunedKBFGS(Untuned, TraceSplit):
    """K-BFGS with λ_A and λ_G in units of each factor's mean eigenvalue, and five averaged pairs for H_A.

    These are s = H_A v and y = 0.75 v + 0.25 (A s + λ_A s), for v = ā, then the direction of inputs in which the step
    before was longest, then three of M's rows times random numbers. H_G counts in units of the largest tr(Γ) so far.
    """

    def split_damping(self, st: Any) -> None:
        st.lambda_A, st.lambda_G = self.damping * st.power_A, self.damping * st.power_G

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        before = st.H_A
        super().update_H_A(st, layer)  # the damping, too
        st.H_A = before
        for v in self.directions(st, layer):
            s = before @ v
            y = layer.A @ s + st.lambda_A[..., None, None] * s
            st.H_A = ref.bfgs(st.H_A, s.squeeze(-1), (0.75 * v + 0.25 * y).squeeze(-1))

    def directions(self, st: Any, layer: ref.Layer) -> list[Tensor]:
        """v of each pair, [*B, d_in, 1]."""
        return [layer.a_bar.unsqueeze(-1), st.u.unsqueeze(-1), *map(unit, combinations(st.M_before.mT, self.k))]

    def initial(self, layer: ref.Layer, A: Tensor) -> ref.LayerState:
        st: Any = super().initial(layer, A)
        st.largest = st.power_G
        return st

    def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
        before, st.largest = st.largest, torch.maximum(st.largest, st.power_G)
        growth = (st.largest / before)[..., None]
        st.H_G = st.H_G / growth[..., None]
        if self.memory is not None:
            st.pairs = [(s, growth * y) for s, y in st.pairs]
        super().update_H_G(st, first, second)


def combinations(M: Tensor, k: int) -> list[Tensor]:
    """M times three columns of random numbers, with the step's number as the seed."""
    shape = (*M.shape[:-2], M.shape[-1], 3)
    random = torch.randn(shape, generator=torch.Generator().manual_seed(k), dtype=torch.float32).to(M.dtype)
    return [M @ r.unsqueeze(-1) for r in random.unbind(-1)]


def unit(v: Tensor) -> Tensor:
    """A vector of length one, [*B, d, 1]."""
    return v / v.norm(dim=-2, keepdim=True)


def in_own_units(Gamma: Tensor) -> Tensor:
    """Γ ÷ its mean eigenvalue."""
    return Gamma / Gamma.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def fisher_directions(M: Tensor, H_A: Tensor, H_G: Tensor, u: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """(s, v) of the one-pass row's four directions at step k."""
    vs = map(unit, (M @ H_A @ u.unsqueeze(-1), *combinations(M, k)))
    return [((H_G @ v).squeeze(-1), v.squeeze(-1)) for v in vs]


def fisher_updates(H_G: Tensor, pairs: list[tuple[Tensor, Tensor]], Gamma: Tensor, epsilon: Any) -> Tensor:
    """H_G after BFGS along these directions, with Γ in units of its mean eigenvalue."""
    unit = in_own_units(Gamma)
    for s, v in pairs:
        y = torch.einsum("...ij,...j->...i", unit, s) + torch.as_tensor(epsilon)[..., None] * s
        H_G = ref.bfgs(H_G, s, 0.75 * v + 0.25 * y)
    return H_G


@dataclass
class UntunedOnePass(UntunedKBFGS):
    """H_G from I / (1 + ε), by BFGS along four directions s = H_G v on y = 0.75 v + 0.25 (Γ s / (tr Γ / d_out) + ε s).

    The first s is the direction of outputs in which the step before was longest. Of the others, v is M times random
    numbers, with the step's number as the seed.
    """

    def split_damping(self, st: Any) -> None:
        super().split_damping(st)
        st.lambda_G = torch.full_like(st.lambda_A, self.damping)

    def step(self, x: Any, y: Any) -> Tensor:
        st: Any
        for name, st in self.state.items():
            st.pairs = fisher_directions(st.M, st.H_A, st.H_G, self.u[name], self.k + 1)
        return super().step(x, y)

    def initial(self, layer: ref.Layer, A: Tensor) -> Any:
        st: Any = super().initial(layer, A)
        st.H_G = st.H_G0 = identity_like(st.H_G) / (1 + st.lambda_G[..., None, None])
        return st

    def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
        st.H_G = fisher_updates(st.H_G, st.pairs, first.Gamma, st.lambda_G)


class UntunedComputed(UntunedOnePass):
    """H_A and H_G are the inverses of moving averages: of A, and of Γ in units of its mean eigenvalue."""

    def initial(self, layer: ref.Layer, A: Tensor) -> Any:
        st: Any = super().initial(layer, A)
        st.A, st.Gamma = layer.A, identity_like(layer.Gamma)
        st.H_G = st.H_G0 = ref.damped_inverse(st.Gamma, st.lambda_G)
        return st

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        A = 0.9 * st.A + 0.1 * layer.A
        super().update_H_A(st, layer)  # the damping, too
        st.A, st.H_A = A, ref.damped_inverse(A, st.lambda_A)

    def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
        st.Gamma = 0.9 * st.Gamma + 0.1 * in_own_units(first.Gamma)
        st.H_G = ref.damped_inverse(st.Gamma, st.lambda_G)


class RunningMeanOfA(ref.ReferenceKBFGS):
    """A moves with the weight min(1 - 1/k, 0.6)."""

    def update_H_A(self, st: Any, layer: ref.Layer) -> None:
        always, self.beta = self.beta, min(1 - 1 / self.k, 0.6)
        super().update_H_A(st, layer)
        self.beta = always


class OnePass(ref.ReferenceKBFGS):
    """H_G = I / λ_G for good."""

    def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
        """Nothing."""


class OnePassLimitedA(LimitedA, OnePass):
    """Both."""


class PiIsOne(ref.ReferenceKFAC):
    """Both factors get √λ."""

    def inverses(self, Omega: Tensor, Gamma: Tensor) -> tuple[Tensor, Tensor]:
        return ref.damped_inverse(Omega, self.damping**0.5), ref.damped_inverse(Gamma, self.damping**0.5)


@dataclass
class RunningMean(PiIsOne):
    """Ω and Γ move with the weight 1 - 1/k, up to a largest one."""

    _: KW_ONLY
    largest: float = 0.9

    def update_curvature(self, x: Any, rng_state: Tensor) -> None:
        self.beta = min(1 - 1 / self.k, self.largest)
        super().update_curvature(x, rng_state)


@dataclass(frozen=True)
class Twin:
    """A reference with the cells of a row."""

    cls: Any
    cells: dict[str, Any]

    def make(self, model: nn.Module, *, lr: float, damping: float, **options: Any) -> Any:
        """For a model that it then moves; with what ``tests.reference`` calls T, T1 and T2."""
        return self.cls(model, F.cross_entropy, lr, damping, **self.cells, **options)

    def derived(self, change: Callable[[Any], Any]) -> "Twin":
        """One of a class that is derived from this one's."""
        return Twin(change(self.cls), self.cells)


def twin_of(cls: Any = ref.ReferenceKBFGS, **cells: Any) -> Twin:
    return Twin(cls, cells)


OLD = {"pair_damping": "2020", "moving_A": True, "split": "equal", "H_G0": "identity"}
TWINS: dict[str, Twin] = {
    "KBFGS": twin_of(),
    "KBFGSL": twin_of(memory=2),
    "KBFGSL, many pairs": twin_of(memory=10),
    "KBFGS, untuned": twin_of(UntunedKBFGS, momentum=0.8),
    "KBFGSL, untuned": twin_of(UntunedKBFGS, momentum=0.8, memory=2),
    "KFAC, untuned": twin_of(UntunedKFAC, momentum=0.8, order="statistics_first"),
    "OnePassKBFGS": twin_of(UntunedOnePass, momentum=0.8),
    "OnePassKFAC": twin_of(UntunedComputed, momentum=0.8),
    "KBFGS20": twin_of(**OLD),
    "KBFGSL20": twin_of(**OLD, memory=2),
    "ProvableKBFGSL": twin_of(ref.ReferenceProvable, split="equal", memory=3),
    "KFAC": twin_of(PiIsOne, order="statistics_first"),
    "KFAC as printed": twin_of(ref.ReferenceKFAC, order="printed"),
    "KFAC, adaptive π": twin_of(ref.ReferenceKFAC, order="statistics_first"),
    "KFAC, running mean": twin_of(RunningMean, order="statistics_first"),
    "#1 off": twin_of(pair_damping="2020"),
    "#2 off": twin_of(moving_A=True),
    "L-BFGS for H_A": twin_of(LimitedA),
    "L-BFGS for both": twin_of(LimitedA, memory=2),
    "trace split": twin_of(TraceSplit),
    "one pass": twin_of(OnePass),
    "one pass, L-BFGS for H_A": twin_of(OnePassLimitedA),
}
