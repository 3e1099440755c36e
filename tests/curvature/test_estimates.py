"""Estimates by probes cover the exact values, Krylov methods equal dense solvers, and both agree with the ladder."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import curvature_ladder, estimate_curvature, exact_block
from kfqn_ext.curvature.estimates import Estimate, Probed, jackknife
from kfqn_ext.curvature.factors import (
    expected_fisher_factor,
    gram,
    output_hessian_roots,
    outputs_by_datum,
    sampled_output_factor,
)
from kfqn_ext.curvature.krylov import extreme_eigenvalues, solve, spectral_norm
from kfqn_ext.curvature.operators import KroneckerOperator, Multiplication, RootsOperator
from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import HessianProduct, OutputGGN, OutputHessian
from kfqn_ext.curvature.sums import kronecker_sums
from kfqn_ext.linalg.nearest import kron
from tests.curvature.nets import F64, Residual, images, ready, residual


def times(M: Tensor, V: Tensor) -> Tensor:
    """A formed matrix times V, by way of vec."""
    return (M @ V.mT.flatten(-2)).reshape(V.shape[-1], V.shape[-2]).mT


def test_intervals_cover_the_exact_value_in_95_percent_of_repetitions() -> None:
    """200 repetitions with 32 Hessian-vector products each; within three standard deviations of 190."""
    model, x, y = residual(nn.Tanh())
    problem = LayerLoss(model, cross_entropy, x, y, "first")
    product, hessian = HessianProduct(problem), OutputHessian(problem)
    A, G = gram(hessian.a)[0], kronecker_sums(hessian).G_tt.mean((0, 1))[0]
    B, K = exact_block(model, cross_entropy, x, y, "first"), kron(A, G)
    exact = {
        "norm": float(B.norm()),
        "inner product": float((B * K).sum()),
        "error": float((K - B).norm() / B.norm()),
        "cosine": float((K * B).sum() / (K.norm() * B.norm())),
    }
    covered = dict.fromkeys(exact, 0)
    for seed in range(200):
        probed = Probed.of([product, KroneckerOperator(A, G)], problem.W.detach(), 32, seed)
        found = (probed.norm(0), probed.inner_product(0, 1), probed.relative_error(1), probed.cosine(1))
        for (name, value), estimate in zip(exact.items(), found, strict=True):
            low, high = estimate.interval(0.95)
            covered[name] += low <= value <= high
    spread = 3 * math.sqrt(200 * 0.95 * 0.05)
    assert all(abs(count - 190) <= spread for count in covered.values()), covered


def test_jackknife_of_a_mean_is_the_textbooks() -> None:
    samples = torch.randn(50, 1, dtype=F64)
    estimate = jackknife(samples, lambda mean: mean[..., 0])
    assert math.isclose(estimate.value, float(samples.mean()), rel_tol=1e-9)
    assert math.isclose(estimate.standard_error, float(samples.std() / 50**0.5), rel_tol=1e-9)
    low, high = estimate.interval()
    assert low < estimate.value < high and str(Estimate(1.5, 0.25, 4)) == "1.5 ± 0.2"
    with pytest.raises(ValueError, match="at least two probes, not 1"):
        jackknife(samples[:1], lambda mean: mean[..., 0])


def test_lanczos_and_minres_equal_dense_solvers() -> None:
    model, x, y = residual(nn.Tanh())
    B = exact_block(model, cross_entropy, x, y, "second")
    product = HessianProduct(LayerLoss(model, cross_entropy, x, y, "second"))
    like, values = product.gradient, torch.linalg.eigvalsh(B)
    ends = extreme_eigenvalues(product, like, count=2, tol=1e-8)
    torch.testing.assert_close(ends, torch.cat((values[:2], values[-2:])), rtol=1e-6, atol=1e-9)
    assert math.isclose(spectral_norm(product, like, tol=1e-8), float(values.abs().max()), rel_tol=1e-6)
    found, converged = solve(product, 0.3, like, tol=1e-10)
    expected = torch.linalg.solve(B + 0.3 * torch.eye(len(B), dtype=F64), like.mT.flatten())
    torch.testing.assert_close(found.mT.flatten(), expected, rtol=1e-6, atol=1e-9)
    assert converged and not solve(product, 0.3, like, tol=1e-10, iterations=2)[1]


def test_lanczos_of_tiny_and_zero_matrices() -> None:
    assert spectral_norm(lambda V: 0 * V, torch.zeros(3, 2)) == 0.0
    assert not extreme_eigenvalues(lambda V: 0 * V, torch.zeros(3, 2)).any()
    assert math.isclose(spectral_norm(lambda V: -3 * V, torch.zeros(1, 1)), 3.0)


def test_operators_equal_their_matrices() -> None:
    d_in, d_out = 5, 2
    a, G = torch.randn(4, d_in, dtype=F64), torch.randn(d_out, d_out, dtype=F64)
    A, G, V = a.T @ a, G + G.mT, torch.randn(d_out, d_in, dtype=F64)
    roots, sigma = torch.randn(6, d_out, d_in, dtype=F64), torch.tensor([1.0, 1, 1, -1, 1, -1], dtype=F64)
    flat = roots.mT.flatten(1)
    pairs: list[tuple[Any, Tensor]] = [
        (KroneckerOperator(A, G), torch.kron(A, G)),
        (RootsOperator(roots, sigma), flat.T @ torch.diag(sigma) @ flat),
        (Multiplication(lambda U: times(torch.kron(A, G), U)), torch.kron(A, G)),
    ]
    for operator, M in pairs:
        torch.testing.assert_close(operator(V), times(M, V))
        lam = 4 * float(torch.linalg.matrix_norm(M, 2))
        damped = M + lam * torch.eye(len(M), dtype=F64)
        torch.testing.assert_close(times(damped, operator.solve(lam, V)[0]), V, rtol=1e-2, atol=1e-2)
        values = torch.linalg.eigvalsh(M)
        ends = operator.extremes(V)
        torch.testing.assert_close(ends[[0, -1]], values[[0, -1]], rtol=0.02, atol=0.02 * float(values.abs().max()))


@pytest.mark.parametrize("train", [False, True])
def test_sampled_output_factor_converges(train: bool) -> None:
    """G by random signs on data and locations, also where data are coupled; Γ by random signs on data."""
    x, y = images(2, 4, 4)
    model = ready(Residual(nn.Tanh(), groups=2), x).train(train)
    model.dropout.p = 0.0
    problem = LayerLoss(model, cross_entropy, x, y, "second")
    hessian = OutputHessian(problem)
    exact = kronecker_sums(hessian).G_tt.mean((0, 1))
    errors = [float((sampled_output_factor(hessian, m) - exact).norm() / exact.norm()) for m in (2, 200)]
    assert errors[1] < 0.15 and errors[1] < errors[0]
    Gamma = kronecker_sums(OutputGGN(problem, hessian)).G_tt.mean((0, 1))
    roots = output_hessian_roots(problem, outputs_by_datum(problem, hessian), len(x))
    found = expected_fisher_factor(hessian, roots, 400)
    assert float((found - Gamma).norm() / Gamma.norm()) < (0.25 if train else 1e-10)


@pytest.mark.parametrize("groups", [1, 2])
def test_estimates_agree_with_the_ladder(groups: int) -> None:
    """Every number of every rung that both have, within its tolerance; norms within four standard errors.

    What depends on G has G's sampling error.
    """
    model, x, y = residual(nn.Tanh(), groups=groups)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.5, curvature_update_freq=1)
    for _ in range(3):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    arguments: Any = (model, cross_entropy, x, y, ["second", "last"], optimizer)
    exact = curvature_ladder(*arguments, progress=False)
    found = estimate_curvature(*arguments, probes=128, location_probes=400, progress=False)
    for layer in found:
        names = [row.rung for row in layer.rows if "(of Gauss-Newton)" not in row.rung]
        assert len(names) == 7
        for row, target in ((layer_row, exact[layer.name, layer_row.rung]) for layer_row in layer.rows[:-1]):
            slack = 0.06 if row.rung != "exact block" else 0.0  # G's own sampling error
            assert abs(row.error - target.error) <= 4 * row.error_se + slack * target.error + 1e-6, row
            assert abs(row.cosine - target.cosine) <= 4 * row.cosine_se + slack + 1e-9, row
            assert math.isclose(row.spectral_error, target.spectral_error, rel_tol=0.1, abs_tol=0.02), row
            assert abs(row.angle - target.angle) < 2, row
            assert math.isclose(row.share, target.share, abs_tol=0.03), row
            assert math.isclose(row.damped_error, target.damped_error, rel_tol=0.15, abs_tol=0.02), row
            assert math.isclose(row.decrease, target.decrease, rel_tol=0.1), row
            assert math.isnan(row.negative_mass) or abs(row.negative_mass - target.negative_mass) < 0.05, row
            held = "H_A⁻¹" in row.rung
            for name, tolerance in {"H_A_error": 1e-9, "H_G_error": 0.1, "start_G_error": 0.1}.items():
                both = getattr(row, name), getattr(target, name)
                assert math.isclose(*both, rel_tol=tolerance) if held else math.isnan(both[0]), (row, name)
            by_both = {"angle", "cosine", "damped_error", "damping", "decrease", "error", "highest", "lowest", "share"}
            by_both |= {"spectral_error", *(["H_A_error", "H_G_error", "start_G_error"] if held else [])}
            numbers = {name for name, value in vars(row).items() if isinstance(value, float) and not math.isnan(value)}
            assert numbers - {"negative_mass"} == by_both | {"error_se", "cosine_se"}, numbers
            assert row.damping == target.damping
            scale = max(abs(target.lowest), target.highest)
            assert abs(row.highest - target.highest) < 0.06 * scale and abs(row.lowest - target.lowest) < 0.06 * scale


def test_estimates_are_reproducible_and_leave_random_numbers_alone() -> None:
    model, x, y = residual(nn.Tanh())
    before = torch.get_rng_state()
    first, second = (
        estimate_curvature(model, cross_entropy, x, y, ["last"], progress=False, probes=4) for _ in range(2)
    )
    assert str(first) == str(second) and torch.equal(before, torch.get_rng_state())


def test_piecewise_linear_network_at_the_floor() -> None:
    """Gauss-Newton is the exact block there, so that Lanczos finds the block's own nearest product."""
    model, x, y = residual(nn.ReLU(inplace=True))
    exact = curvature_ladder(model, cross_entropy, x, y, ["second"], progress=False)
    found = estimate_curvature(model, cross_entropy, x, y, ["second"], probes=64, progress=False)
    row, target = found[0].rows[-1], exact[0].rows[-1]
    assert row.rung.startswith(target.rung)
    assert abs(row.error - target.error) < 4 * row.error_se and math.isclose(row.highest, target.highest, rel_tol=1e-4)
    assert found["second", "Gauss-Newton"].error < 1e-6


def test_options_and_mistakes(tmp_path: Any) -> None:
    model, x, y = residual(nn.Tanh())
    report = estimate_curvature(
        model, cross_entropy, x, y, ["last"], probes=2, spectra=False, damping=0.1, memory_budget=10, progress=False
    )
    assert "Γ's 4 Hessians by 3 outputs take" in str(report) and "spectral" not in str(report)
    assert "Gauss-Newton" not in [row.rung for row in report["last"].rows] and "Ω" not in str(report)
    more = {"probes": 2, "spectra": False, "damping": 0.1, "progress": False}
    report = estimate_curvature(model, cross_entropy, x, y, ["last"], memory_budget=4 * 4 * 3**2 * 8, **more)
    assert "12 roots take 0.00467 MiB, above memory_budget (0.0011 MiB)" in str(report) and "Ω" in str(report)
    report.plot(tmp_path / "without_spectra.png")
    with pytest.raises(ValueError, match="probes=1 must be at least 2"):
        estimate_curvature(model, cross_entropy, x, y, probes=1)


def test_plot_without_matrices(tmp_path: Any) -> None:
    model, x, y = residual(nn.Tanh())
    report = estimate_curvature(model, cross_entropy, x, y, ["last"], progress=False, probes=4)
    report.plot(tmp_path / "estimates.png")
    assert (tmp_path / "estimates.png").stat().st_size > 5_000


def test_identity_is_multiplied() -> None:
    V = torch.randn(3, 2, dtype=F64)
    assert torch.equal(Multiplication(lambda U: U)(V), V)


@pytest.mark.parametrize("probes", [2, 4])
def test_estimates_are_possible(probes: int) -> None:
    """Few probes overshoot when the bias is taken off: no norm is negative, no cosine above 1."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.rand(6, 4, dtype=F64)
    more: Any = {"damping": 0.1, "spectra": False, "progress": False}
    arguments: Any = (model, cross_entropy, x, torch.arange(6) % 3, ["0"])
    for seed in range(30):
        for row in estimate_curvature(*arguments, probes=probes, seed=seed, **more)[0].rows:
            assert row.error >= 0 and row.damped_error >= 0 and abs(row.cosine) <= 1, row
    samples = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=F64)
    assert jackknife(samples, lambda mean: mean[..., 0].sqrt() - 5, -1.0, 1.0).value == -1.0
    assert jackknife(samples, lambda mean: mean[..., 0].sqrt() + 5, -1.0, 1.0).value == 1.0


@pytest.mark.parametrize("damping", [None, 0.1])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_without_curvature(groups: int, damping: float | None) -> None:
    """Zero is measured as the ladder measures it, and has zero for its nearest product."""
    model = nn.Sequential(nn.Conv2d(2, 4, 1, groups=groups), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    torch.nn.init.constant_(model[0].bias, -10)  # type: ignore[arg-type]
    arguments: Any = (model, cross_entropy, torch.rand(6, 2, 2, 2, dtype=F64), torch.arange(6) % 3, ["0"])
    exact = curvature_ladder(*arguments, damping=damping, progress=False)
    found = estimate_curvature(*arguments, damping=damping, progress=False)
    for row in found["0"].rows:
        target = exact["0", row.rung.removesuffix(" (of Gauss-Newton)")]
        assert (row.error, row.spectral_error) == (target.error, target.spectral_error), row
        assert math.isclose(row.lowest, target.lowest) and math.isclose(row.highest, target.highest)
    assert not found["0"].rows[-1].highest


def test_a_direction_that_did_not_converge_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from kfqn_ext.curvature import operators

    model, x, y = residual(nn.Tanh())
    arguments: Any = (model, cross_entropy, x, y, ["first"])
    more: Any = {"damping": 1e-3, "probes": 2, "spectra": False, "progress": False}
    assert "MINRES" not in str(estimate_curvature(*arguments, **more))
    monkeypatch.setattr(operators, "solve", lambda *args: solve(*args, iterations=1))
    text = str(estimate_curvature(*arguments, **more))
    assert "Newton's direction: MINRES reached" in text and "Gauss-Newton: MINRES reached" in text
