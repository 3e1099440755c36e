"""The paper's lemmas as properties, with their constants, and the bounds that they imply along a real run."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.geometry import geometry_of
from kfqn_ext.linalg import bfgs_update, damped_inverse, powell_identity_lm
from kfqn_ext.optim import Minibatch, ProvableKBFGSL, kappa_bounds, theorem_step_sizes
from kfqn_ext.optim.inverses.lbfgs import start_pairs, times_pairs, update_pairs
from tests import reference as ref
from tests.cases import CONVS, FEW_EXAMPLES

F64 = torch.float64
SLACK = 1 + 1e-9  # rounding
seeds = st.integers(0, 2**31)
mus = {"mu1": st.floats(0.01, 0.99), "mu2": st.floats(-6, 6).map(lambda e: 10.0**e)}
kinds = st.sampled_from(["random", "curved", "negative", "orthogonal", "zero s", "zero y", "tiny s", "tiny y"])


def mu_3(mu1: float, mu2: float) -> float:
    return mu1 / (mu2 * (1 + 2 * mu1))


def pair(kind: str, d: int) -> tuple[Tensor, Tensor]:
    """Any pair at all: the damping must cope."""
    s, y = torch.randn(2, d, dtype=F64)
    scales = {"zero s": (0, 1), "zero y": (1, 0), "tiny s": (1e-8, 1), "tiny y": (1, 1e-8)}.get(kind, (1, 1))
    if kind == "curved":
        y = s + 0.3 * y
    elif kind == "negative":
        y = 0.3 * y - s
    elif kind == "orthogonal":
        y = y - (y @ s) / (s @ s) * s
    return s * scales[0], y * scales[1]


def ratios(s: Tensor, y: Tensor) -> tuple[float, float]:
    """‖s‖² / sᵀy and ‖y‖² / sᵀy."""
    return float(s @ s / (s @ y)), float(y @ y / (s @ y))


def damped(kind: str, d: int, mu1: float, mu2: float) -> tuple[Tensor, Tensor]:
    s, y = pair(kind, d)
    return powell_identity_lm(s, y, torch.empty(0), mu1, torch.tensor([mu2], dtype=F64))


def norm(M: Tensor) -> float:
    return float(torch.linalg.matrix_norm(M, 2))


# ------------------------------------------------------------------ lemma_3, lemma_4, lemma_5, lemma_1


@FEW_EXAMPLES
@given(seed=seeds, kind=kinds, d=st.integers(1, 6), **mus)
def test_lemma_3(seed: int, kind: str, d: int, mu1: float, mu2: float) -> None:
    """D_P(I) D_LM: ‖s̃‖² / s̃ᵀỹ ≤ 1 / μ₂ and ‖ỹ‖² / s̃ᵀỹ ≤ 1 / μ₃."""
    torch.manual_seed(seed)
    first, second = ratios(*damped(kind, d, mu1, mu2))
    assert 0 < first <= SLACK / mu2
    assert 0 < second <= SLACK / mu_3(mu1, mu2)


def test_lemma_3_s_first_bound_is_attained() -> None:
    """Where y = 0, all curvature is that of the damping."""
    s, y = powell_identity_lm(torch.randn(4, dtype=F64), torch.zeros(4, dtype=F64), torch.empty(0), 0.2, 3.0)
    assert ratios(s, y)[0] == pytest.approx(1 / 3)


@FEW_EXAMPLES
@given(seed=seeds, d=st.integers(1, 6), spread=st.integers(0, 6), kind=kinds, **mus)
def test_lemma_4(seed: int, d: int, spread: int, kind: str, mu1: float, mu2: float) -> None:
    """‖B⁺‖ ≤ ‖B‖ + 1/μ₃ and ‖H⁺‖ ≤ (1 + 1/√(μ₂μ₃))² ‖H‖ + 1/μ₂, from any positive definite H."""
    torch.manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, dtype=F64)).Q
    H = Q * torch.logspace(-spread / 2, spread / 2, d, dtype=F64) @ Q.T / mu2
    H = (H + H.T) / 2
    s, y = damped(kind, d, mu1, mu2)
    # The bounds of lemma_4 in terms of the pair's own ratios, which are sharper than lemma_3's.
    for one, other in (ratios(s, y), (1 / mu2, 1 / mu_3(mu1, mu2))):
        H_next = bfgs_update(H, s, y)
        assert norm(torch.linalg.inv(H_next)) <= (norm(torch.linalg.inv(H)) + other) * (1 + 1e-6)
        assert norm(H_next) <= ((1 + math.sqrt(one * other)) ** 2 * norm(H) + one) * SLACK


@FEW_EXAMPLES
@given(
    seed=seeds, d=st.integers(1, 8), memory=st.integers(1, 6), kind=st.lists(kinds, min_size=8, max_size=8),
    mu1=st.floats(0.01, 0.99), damping=st.floats(-4, 4).map(lambda e: 10.0**e),
)  # fmt: skip
def test_lemma_5(seed: int, d: int, memory: int, kind: list[str], mu1: float, damping: float) -> None:
    """κ_G: H_G from I / λ_G and the last p damped pairs stays between the bounds, whatever the pairs."""
    torch.manual_seed(seed)
    bounds = kappa_bounds(1.0, 1, 1.0, damping, memory, mu1)
    state: dict[str, Tensor] = {}
    start_pairs(state, "G", torch.zeros(d, dtype=F64), memory, torch.tensor(1 / damping, dtype=F64))
    for one in kind:  # eight pairs, so that old ones are dropped
        s, y = damped(one, d, mu1, damping)
        assert update_pairs([state], "G", s[None], y[None], torch.tensor([1 / damping], dtype=F64))
        eigenvalues = torch.linalg.eigvalsh(times_pairs(state, "G", torch.eye(d, dtype=F64)))
        assert bounds.low_G <= eigenvalues[0] * (1 + 1e-6) and eigenvalues[-1] <= bounds.high_G * SLACK


@FEW_EXAMPLES
@given(
    seed=seeds, dims=st.integers(0, 3), bias=st.booleans(), groups=st.sampled_from([1, 2]), stride=st.integers(1, 2),
    padding=st.integers(0, 2), phi=st.floats(0.01, 10),
)  # fmt: skip
def test_lemma_1(seed: int, dims: int, bias: bool, groups: int, stride: int, padding: int, phi: float) -> None:
    """(i) Â ⪯ (J |Δ| φ² + 1) |T| I, and (ii) κ_low I ⪯ H_A ⊗ H_G ⪯ κ_high I with the extremes of H_G."""
    torch.manual_seed(seed)
    options: Any = {"bias": bias, "groups": groups, "stride": stride, "padding": padding}
    layer: Any = CONVS[dims](4, 4, 2, **options) if dims else nn.Linear(4, 3, bias=bias)
    x = (2 * torch.rand(3, 4, *[4] * dims) - 1).sign() * phi  # at the bound everywhere
    geometry = geometry_of(layer)
    assert geometry is not None
    A = geometry.gram(x.double())
    T = geometry.num_locations(layer(x))
    patch_norm2 = (geometry.d_in - bias) * phi**2 + 1
    largest = float(torch.linalg.eigvalsh(A).max())
    assert largest <= patch_norm2 * T * SLACK

    bounds = kappa_bounds(patch_norm2, T, damping_A=0.3, damping_G=0.2, history_size=2)
    H_A = torch.linalg.eigvalsh(damped_inverse(A, 0.3))
    assert bounds.low <= float(H_A.min()) * bounds.low_G * SLACK
    assert float(H_A.max()) * bounds.high_G <= bounds.high * SLACK


def test_lemma_1_is_attained_by_equal_patches() -> None:
    x = torch.full((5, 3), 2.0, dtype=F64)
    geometry = geometry_of(nn.Linear(3, 2))
    assert geometry is not None
    assert float(torch.linalg.eigvalsh(geometry.gram(x))[-1]) == pytest.approx(3 * 2**2 + 1)


def test_constants_by_hand() -> None:
    """μ₁ = 0.2, λ_G = 2, λ_A = 3, p = 2: μ₃ = 0.2 / (2 · 1.4) = 1/14, and 1 / (μ₂ μ₃) = 7."""
    growth = (1 + math.sqrt(7)) ** 2
    bounds = kappa_bounds(patch_norm2=5.0, num_locations=4, damping_A=3.0, damping_G=2.0, history_size=2)
    assert bounds.low_G == pytest.approx(1 / (2 + 2 * 14))
    assert bounds.high_G == pytest.approx(growth * (growth / 2 + 1 / 2) + 1 / 2)  # lemma_4, twice
    assert bounds.low == pytest.approx(bounds.low_G / (5 * 4 + 3)) and bounds.high == pytest.approx(bounds.high_G / 3)


# ------------------------------------------------------------------ a real run


def sigmoid_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Conv2d(3, 4, 3, stride=2, groups=1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(4 * 4, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("lr", "damping_A", "damping_G"), [(0.5, 1.0, 1.0), (0.2, 20.0, 0.05)])
def test_the_provable_variant_stays_inside_its_bounds(lr: float, damping_A: float, damping_G: float) -> None:
    """200 steps on fresh minibatches, every input of every layer in [0, 1]: φ = 1."""
    model, memory = sigmoid_net().double(), 3
    optimizer = ProvableKBFGSL(model, lr=lr, damping_A=damping_A, damping_G=damping_G, history_size=memory)
    layers: list[Any] = [m for m in model if isinstance(m, ref.LAYERS)]
    locations, extremes = {layers[0]: 36, layers[1]: 4, layers[2]: 1}, {layer: [] for layer in layers}
    losses = []
    for _ in range(200):
        x = torch.rand(8, 1, 6, 6, dtype=F64)
        y = (x.mean((1, 2, 3)) > 0.5).long() + (x[:, 0, 0, 0] > 0.5)
        losses.append(float(optimizer.step(Minibatch(model, F.cross_entropy, x, y))))
        for d in optimizer.diagnostics(eigenvalues=True):
            assert d.A is not None and d.G is not None
            layer = model.get_submodule(d.name)
            extremes[layer].append((d.A.smallest * d.G.smallest, d.A.largest * d.G.largest, d.G.smallest, d.G.largest))
    for layer, found in extremes.items():
        bounds = kappa_bounds(layer.weight[0].numel() + 1, locations[layer], damping_A, damping_G, memory)
        low, high, low_G, high_G = (torch.tensor(column) for column in zip(*found, strict=True))
        assert bounds.low <= low.min() and high.max() <= bounds.high
        assert bounds.low_G <= low_G.min() and high_G.max() <= bounds.high_G
        assert high_G.max() > low_G.min() * 1.001  # there was something to learn
    assert sum(losses[-20:]) < sum(losses[:20])


def test_theorem_step_sizes() -> None:
    steps = theorem_step_sizes(kappa_low=0.1, kappa_high=2.0, lipschitz=5.0, beta=0.75)
    assert steps(1) == pytest.approx(0.1 / (5 * 4)) and steps(16) == pytest.approx(steps(1) / 8)
    # Σ α_k = ∞ and Σ α_k² < ∞, what the theory of stochastic quasi-Newton methods asks for.
    assert steps(10_000) * 10_000 > steps(100) * 100 and steps(10_000) ** 2 * 10_000 < steps(100) ** 2 * 100


@pytest.mark.parametrize("beta", [0.5, 1.0, 0.0, 2.0, float("nan")])
def test_theorem_step_sizes_need_beta_in_range(beta: float) -> None:
    with pytest.raises(ValueError, match=r"Invalid beta: .* in \(0.5, 1\)"):
        theorem_step_sizes(0.1, 2.0, 5.0, beta)


@pytest.mark.parametrize("name", ["damping_A", "damping_G"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_dampings_of_the_provable_variant(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        ProvableKBFGSL(sigmoid_net(), lr=0.1, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("mu1", 0.0), ("mu1", 1.0), ("mu1", -0.1), ("decay", 1.0), ("decay", -0.1)]
)
def test_constants_of_the_provable_variant(name: str, value: float) -> None:
    """0 < μ₁ < 1 and 0 ≤ β < 1: with others the lemmas do not hold."""
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        ProvableKBFGSL(sigmoid_net(), lr=0.1, **{name: value})
