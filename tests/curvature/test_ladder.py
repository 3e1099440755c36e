"""``curvature_ladder``: its rungs against independent ones, its inequalities, its report."""

import copy
import math
from typing import Any

import pytest
import torch
from curvlinops import KFACLinearOperator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KBFGSL, Minibatch
from kfqn_ext.curvature import CurvatureReport, curvature_ladder, estimate_curvature, exact_block, exact_ggn_block
from kfqn_ext.curvature.factors import gram
from kfqn_ext.curvature.ladder import default_damping
from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import OutputGGN, OutputHessian
from kfqn_ext.curvature.report import FLOOR, GRADIENT
from kfqn_ext.curvature.sums import kronecker_sums
from kfqn_ext.linalg.nearest import kron
from kfqn_ext.linalg.operators import Inverses
from tests import reference as ref
from tests.curvature.nets import CLASSES, F64, LOSSES, N, PerLocation, images, ready, residual
from tests.curvature.test_exact import paper_order, plain
from tests.optim.family import FAMILY, rows

SINGLE = ("A ⊗ G", "(A + λ_A I) ⊗ (G + λ_G I)", GRADIENT, "Ω ⊗ Γ", "KBFGS: H_A⁻¹ ⊗ H_G⁻¹")


def ladder(
    model: nn.Module, x: Any, y: Any, layers: Any = None, optimizers: Any = None, **more: Any
) -> CurvatureReport:
    return curvature_ladder(model, cross_entropy, x, y, layers, optimizers, progress=False, **more)


def trained(row: str = "KBFGS", steps: int = 5, **more: Any) -> tuple[nn.Module, Any, Any, Any]:
    model, x, y = residual(nn.Tanh(), groups=2)
    optimizer = FAMILY[row].make(model, lr=0.1, **more)
    for _ in range(steps):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    return model, x, y, optimizer


# --------------------------------------------------------------------------------------------- the inequalities


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["tanh", "relu", "sigmoid"]), st.booleans(), st.floats(1e-3, 1e3))
def test_no_single_product_beats_the_nearest(seed: int, activation: str, train: bool, damping: float) -> None:
    """Nor does ``thm_4`` ever miss. Over random nets, activations, dampings, and modes of BatchNorm."""
    torch.manual_seed(seed)
    model, x, y = residual({"tanh": nn.Tanh(), "relu": nn.ReLU(), "sigmoid": nn.Sigmoid()}[activation])
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=damping, curvature_update_freq=1)
    for _ in range(2):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    report = ladder(model.train(train), x, y, ["first", "last"], optimizer)
    for layer in report:
        errors = {row.rung: row.error for row in layer.rows}
        assert errors["Σ A_tt' ⊗ G_tt'"] < 1e-10
        for name in SINGLE:
            assert errors[FLOOR] <= errors[name] * (1 + 1e-9) + 1e-12
        for row in layer.rows:
            if not math.isnan(row.cosine):  # a dead network has no curvature
                assert math.sqrt(max(0.0, 1 - row.cosine**2)) <= row.error + 1e-7  # the best multiple is no worse
            assert not row.share > 1 + 1e-9 or layer.rows[0].lowest + row.damping < 0


# --------------------------------------------------------------------------------------------- the rungs


def exact_gamma(problem: LayerLoss, hessian: OutputHessian) -> torch.Tensor:
    return kronecker_sums(OutputGGN(problem, hessian)).G_tt.mean((0, 1))


@pytest.mark.parametrize("layer", ["0", "3", "6"])
def test_fisher_factors_equal_curvlinops(layer: str) -> None:
    """Ω ⊗ Γ with the expectation over the predictive distribution, and the oracle's Ω."""
    model, x, y = plain()
    problem = LayerLoss(model, cross_entropy, x, y, layer)
    hessian = OutputHessian(problem)
    ours = kron(gram(hessian.a), exact_gamma(problem, hessian))[0]
    module = model.get_submodule(layer)
    kfac = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        [*module.parameters()],
        [(x, y)],
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    expected = paper_order(module, kfac @ torch.eye(kfac.shape[0], dtype=F64))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    oracle = ref.capture(copy.deepcopy(model), cross_entropy, x, y).layers[layer]
    torch.testing.assert_close(gram(hessian.a)[0], oracle.A)


@pytest.mark.parametrize("loss", LOSSES)
def test_expected_fisher_factor_is_the_mean_over_targets(loss: str) -> None:
    """For the softmax: the oracle's Γ for each target, weighted with its probability."""
    x, y = images(2, 3, 3)
    model = ready(PerLocation(nn.Conv2d(2, 3, 2), nn.Tanh()), x)
    problem = LayerLoss(model, LOSSES[loss], x, y, "layer")
    found = exact_gamma(problem, OutputHessian(problem))[0]
    if loss == "squared":  # its predictive distribution is continuous; its Gauss-Newton matrix has Γ on the diagonal
        assert float(torch.linalg.eigvalsh(found).min()) > -1e-12
        return
    p = torch.softmax(model(x), -1).detach()
    expected = torch.zeros_like(found)
    for n in range(N):
        for c in range(CLASSES):
            one = ref.capture(copy.deepcopy(model), cross_entropy, x[n : n + 1], torch.tensor([c]))
            expected += p[n, c] * one.layers["layer"].Gamma / N
    torch.testing.assert_close(found, expected)


def test_piecewise_linear_networks_have_g_equal_gamma() -> None:
    """So that K-BFGS's A ⊗ G and KFAC's Ω ⊗ Γ are the same matrix, and Gauss-Newton is the exact block."""
    model, x, y = residual(nn.ReLU(inplace=True))
    for layer in ladder(model, x, y):
        rows = {row.rung: row for row in layer.rows}
        assert rows["Gauss-Newton"].error < 1e-9
        assert abs(rows["A ⊗ G"].error - rows["Ω ⊗ Γ"].error) < 1e-9


def test_gauss_newton_rung_with_coupled_data() -> None:
    model, x, y = residual(nn.Tanh())
    model.train()
    model.dropout.p = 0.0
    report = ladder(model, x, y, ["first"])
    B, GGN = (form(model, cross_entropy, x, y, "first") for form in (exact_block, exact_ggn_block))
    assert abs(report["first", "Gauss-Newton"].error - float((GGN - B).norm() / B.norm())) < 1e-9
    assert "depends on other data" in str(report)
    assert report["first", "independent data"].error > 0.01


@pytest.mark.parametrize(
    "row", rows(lambda member: not member.learns_first)
)  # what it shows is what it multiplies with
def test_held_inverses_are_the_optimizers_direction(row: str) -> None:
    """H_G M H_A of the optimizer's own step, from what it shows; dense and compact, with channel groups."""
    model, x, y, optimizer = trained(row)
    layer = model.second
    W, parameters = ref.weight_matrix(layer), [layer.weight, layer.bias]
    g = ref.as_matrix(layer, *torch.autograd.grad(cross_entropy(model(x), y), parameters))
    M = optimizer.param_groups[0]["momentum"] * optimizer.state[layer.weight]["momentum"] + g
    H_A, H_G = optimizer.inverses(layer.weight).dense()
    P = H_G @ M @ H_A
    optimizer.step(Minibatch(model, cross_entropy, x, y))
    step = W - ref.weight_matrix(layer)
    torch.testing.assert_close(step, FAMILY[row].rate(0.1, step, P) * P, rtol=1e-9, atol=1e-12)


def test_held_rungs_of_several_optimizers() -> None:
    model, x, y, first = trained()
    second = KBFGSL.as_printed(model, lr=0.1, damping=0.5)
    optimizers = {"K-BFGS": first, "K-BFGS(L)": second}
    report = ladder(model, x, y, ["second"], optimizers)
    row = report["second", "K-BFGS: H_A⁻¹ ⊗ H_G⁻¹"]
    assert row.damping == 1.0 and row.H_A_error > 0 and row.H_G_error > 0 and row.H_error > 0
    assert report["second", "A ⊗ G"].damping == 1.0  # the first optimizer's
    assert "K-BFGS(L) holds no H_A and H_G for layer second" in str(report)
    assert not second.state  # looking did not create any


def test_a_held_inverse_that_is_exact_has_no_error() -> None:
    """H_A = (A + λ_A I)⁻¹ and H_G = (G + λ_G I)⁻¹ in a stand-in optimizer: the rung equals algo_8's."""
    model, x, y = residual(nn.Tanh())
    problem = LayerLoss(model, cross_entropy, x, y, "second")
    hessian, lam = OutputHessian(problem), 0.3
    T = hessian.a.shape[1]
    report = ladder(model, x, y, ["second"], damping=lam)
    target = report["second", "(A + λ_A I) ⊗ (G + λ_G I)"]
    G = kronecker_sums(hessian).G_tt.mean((0, 1))[0]

    class StandIn:
        def inverses(self, weight: Tensor) -> Inverses:
            H_A, H_G = (
                ref.damped_inverse(gram(hessian.a)[0], math.sqrt(T * lam)),
                ref.damped_inverse(G, (lam / T) ** 0.5),
            )
            return Inverses(H_A, H_G, (math.sqrt(T * lam), math.sqrt(lam / T)))

    row = ladder(model, x, y, ["second"], StandIn())["second", "StandIn: H_A⁻¹ ⊗ H_G⁻¹"]
    assert row.H_A_error < 1e-10 and row.H_G_error < 1e-10 and row.H_aim_error < 1e-10
    for name in ("error", "cosine", "angle", "share", "H_error", "H_exact_error"):
        assert math.isclose(getattr(row, name), getattr(target, name), rel_tol=1e-7), name


@pytest.mark.parametrize("dampings", [None, pytest.param((0.0, 0.0), marks=pytest.mark.slow)])
def test_stand_ins_need_nothing_but_inverses(dampings: Any) -> None:
    """λ is the call's where the stand-in names none; without λ there is no aim, and no number about it."""
    model, x, y, optimizer = trained()
    H_A, H_G = optimizer.inverses(model.second.weight).dense()
    stand_in: Any = type("StandIn", (), {"inverses": lambda self, weight: Inverses(H_A, H_G, dampings)})()
    for function in (curvature_ladder, estimate_curvature):
        for damping in (1.0, None):
            more: Any = {"damping": damping, "progress": False}
            rung = "held: H_A⁻¹ ⊗ H_G⁻¹"
            row = function(model, cross_entropy, x, y, ["second"], {"held": stand_in}, **more)["second", rung]
            assert row.error > 0 and row.angle > 0
            expected = function(model, cross_entropy, x, y, ["second"], {"held": optimizer}, **more)["second", rung]
            for name in ("H_A_error", "H_G_error", "start_G_error", "H_aim_error", "H_exact_error", "damping"):
                value, target = getattr(row, name), getattr(expected, name)
                if dampings == (0.0, 0.0) and name != "damping":
                    assert math.isnan(value), name
                elif damping == 1.0 and dampings is None:  # the optimizer's own
                    assert math.isclose(value, target, rel_tol=1e-6) or math.isnan(value) and math.isnan(target), name


@pytest.mark.parametrize(
    ("row", "history_size"),
    [
        pytest.param(row, p, marks=pytest.mark.slow if p > 1 else ())
        for row, member in FAMILY.items()
        for p in ((1, 100) if member.limited else (1,))  # compact, dense
    ],
)
def test_every_form_of_an_inverse_has_its_rung(row: str, history_size: int) -> None:
    """Whatever a row keeps its inverses as: pairs, a number, or a matrix."""
    model, x, y = residual(nn.Tanh())
    optimizer = FAMILY[row].with_memory(history_size).make(model, lr=0.01)
    for _ in range(3):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    report = ladder(model, x, y, ["second"], {"held": optimizer})
    assert report["second", "held: H_A⁻¹ ⊗ H_G⁻¹"].H_A_error > 0 and "holds no" not in str(report)


@pytest.mark.slow
def test_many_outputs() -> None:
    """K-BFGS(L) of 300 outputs, more than 2p: its H_G is never formed, and is shown all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 300), nn.Tanh(), nn.Linear(300, CLASSES)).double()
    x, y = torch.randn(8, 2, dtype=F64), torch.arange(8) % CLASSES
    optimizer = KBFGSL.as_printed(model, lr=0.01, damping=1.0)
    for _ in range(3):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    assert "H_G" not in optimizer.state[model[0].weight]
    row = ladder(model, x, y, ["0"], optimizer)["0", "KBFGSL: H_A⁻¹ ⊗ H_G⁻¹"]
    assert 0 < row.H_G_error < 1


@pytest.mark.parametrize("row", rows(lambda member: not member.pairs_A))  # these start from a multiple of the identity
def test_held_inverses_aim_where_their_optimizer_aims(row: str) -> None:
    """Each with its own split of λ: an H_A that was inverted from this minibatch's A has no error."""
    model, x, y = residual(nn.Tanh(), groups=2)
    given = {"damping_A": 0.2, "damping_G": 0.5} if FAMILY[row].given_damping else {}
    T = 5 if FAMILY[row].secant_G else 1  # pairs of such steps are rounding errors
    optimizer = FAMILY[row].make(model, lr=1e-12, damping=0.3, T=T, **given)
    for _ in range(2):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    for layer in ("first", "second", "last"):
        held = ladder(model, x, y, [layer], {"held": optimizer})[layer, "held: H_A⁻¹ ⊗ H_G⁻¹"]
        assert held.H_A_error < 1e-6, held
        assert held.H_G_error > 0
        if not FAMILY[row].relative:  # there λ_A λ_G is no λ, and I / λ_G may be far from any inverse
            assert math.isclose(held.damping, 0.1 if given else 0.3, rel_tol=1e-6)
            assert held.H_G_error < 1.5


def test_newton_direction_is_best() -> None:
    """The exact block has no angle and all of the decrease, which one step on the quadratic model gives."""
    model, x, y = residual(nn.Tanh())
    lam = 0.7
    row = ladder(model, x, y, ["first"], damping=lam)["first", "exact block"]
    B = exact_block(model, cross_entropy, x, y, "first")
    cross_entropy(model(x), y).backward()
    g = ref.as_matrix(model.first, model.first.weight.grad, model.first.bias.grad).mT.flatten()
    d = torch.linalg.solve(B + lam * torch.eye(len(B), dtype=F64), g)
    assert row.angle < 1e-4 and math.isclose(row.share, 1.0)
    slope, bend = g @ d, d @ B @ d
    expected = float(slope**2 / (2 * bend)) if bend > 0 else math.inf
    assert math.isclose(row.decrease, expected, rel_tol=1e-9)


def test_default_damping_makes_the_block_definite() -> None:
    assert default_damping(-2.0, 5.0) == pytest.approx(2.05)
    assert default_damping(0.5, 5.0) == pytest.approx(0.05)
    model, x, y = residual(nn.Tanh())
    row = ladder(model, x, y, ["second"])["second", "exact block"]
    assert row.lowest + row.damping > 0


def test_extra_rungs() -> None:
    model, x, y = residual(nn.Tanh())
    B = exact_block(model, cross_entropy, x, y, "last")
    extra = {"diagonal": torch.diag(B.diagonal()), "factors": (torch.eye(17), torch.eye(CLASSES))}
    report = ladder(model, x, y, ["last"], extra=lambda name: extra)
    assert math.isclose(
        report["last", "diagonal"].error, float((B - torch.diag(B.diagonal())).norm() / B.norm()), rel_tol=1e-9
    )
    assert report["last", "factors"].highest == 1.0
    with pytest.raises(ValueError, match=r"Rung 'wrong' of layer last has shape \[2, 2\], not \[51, 51\]"):
        ladder(model, x, y, ["last"], extra=lambda name: {"wrong": torch.eye(2)})
