"""Ω and Γ against explicit sums, against BackPACK and curvlinops, and against the exact curvature where it factors."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from backpack import extend as stock_extend
from backpack.extensions import KFAC as BackpackKFAC
from backpack.extensions import KFLR
from curvlinops import KFACLinearOperator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.extensions import FactorTraces, InputGram, KFACFactors, KroneckerFactors, extend
from kfqn_ext.geometry import geometry_of
from kfqn_ext.optim import Minibatch
from tests import reference as ref
from tests.cases import (
    ALL_CASES,
    FEW_EXAMPLES,
    IGNORE_EVEN_SAME,
    Case,
    Explicit,
    assert_close,
    every_case,
    random_cases,
)

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
BATCHED = [c for c in ALL_CASES if len(c.shape) > len(getattr(c.layer(), "kernel_size", ())) + 1 and c.shape[0] > 1]
some_cases = pytest.mark.parametrize("case", BATCHED[::9], ids=str)


def curved(h: Tensor) -> Tensor:
    """A loss for each datum."""
    return (h.sin() + h.square()).flatten(1).sum(1)


# ------------------------------------------------------------------ explicit sums


def check(case: Case, dtype: torch.dtype) -> None:
    layer, x = extend(case.layer(dtype)), case.input(dtype)
    geometry, factors, traces = geometry_of(layer), KFACFactors(), FactorTraces()
    assert geometry is not None
    with backpack(factors, traces):
        h = layer(x)
        g = torch.randn_like(h) / geometry.as_batch(h).shape[0]
        h.backward(g)
    q: KroneckerFactors = factors[layer]
    assert layer.weight.kfac_factors is q
    explicit = Explicit(layer, geometry.as_batch(x), geometry.as_batch(g))
    explicit.check(TOLERANCE[dtype], A=q.Omega, Gamma=q.Gamma)
    assert (q.num_data, q.num_locations) == (explicit.seen.num_data, explicit.seen.num_locations)
    # Their mean eigenvalues, without forming them.
    for got, factor in ((traces[layer].A, explicit.seen.A), (traces[layer].G, explicit.seen.Gamma)):
        assert_close(got, factor.diagonal(dim1=-2, dim2=-1).mean(-1), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@every_case
def test_factors_equal_explicit_sums(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31))
def test_factors_of_a_random_layer(case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    check(case, F64)


def test_omega_is_the_input_gram() -> None:
    layer, factors, gram = extend(nn.Conv2d(2, 3, 3, dtype=F64)), KFACFactors(), InputGram()
    with backpack(factors, gram):
        curved(layer(torch.randn(4, 2, 6, 6, dtype=F64))).mean().backward()
    assert torch.equal(factors[layer].Omega, gram[layer].A)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers_have_float32_factors(dtype: torch.dtype) -> None:
    layer, x, factors = extend(nn.Linear(5, 4, dtype=dtype)), torch.randn(6, 5, dtype=dtype), KFACFactors()
    with backpack(factors):
        h = layer(x)
        g = torch.randn_like(h) / 6
        h.backward(g)
    q = factors[layer]
    assert q.Omega.dtype == q.Gamma.dtype == torch.float32
    Explicit(layer, x, g).check(1e-5, A=q.Omega, Gamma=q.Gamma)


# ------------------------------------------------------------------ scaling and merging


def same(got: KroneckerFactors, want: KroneckerFactors) -> None:
    assert (got.num_data, got.num_locations) == (want.num_data, pytest.approx(want.num_locations))
    assert_close(got.Omega, want.Omega, 1e-13)
    assert_close(got.Gamma, want.Gamma, 1e-13)


@some_cases
def test_a_loss_that_is_a_sum_over_data_has_the_factors_of_the_mean(case: Case) -> None:
    layer, x, mean, total = extend(case.layer()), case.input(), KFACFactors(), KFACFactors("sum")
    with backpack(mean):
        curved(layer(x)).mean().backward()
    with backpack(total):
        curved(layer(x)).sum().backward()
    same(total[layer], mean[layer])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@some_cases
def test_micro_batches_add_up_to_the_big_batch(case: Case, reduction: str) -> None:
    """Each micro-batch's backward pass adds its part of the gradient of the big batch's loss."""
    layer, x1, x2, x3 = extend(case.layer()), case.input(), case.input()[:1], case.input()
    x = torch.cat((x1, x2, x3))
    whole, parts = KFACFactors(reduction), KFACFactors(reduction, accumulate=True)
    scale = 1 / len(x) if reduction == "mean" else 1.0
    with backpack(whole):
        (curved(layer(x)).sum() * scale).backward()
    for part in (x1, x2, x3):
        with backpack(parts):
            (curved(layer(part)).sum() * scale).backward()
    same(parts[layer], whole[layer])
    parts.clear()
    assert layer not in parts
    with backpack(parts):  # and a fresh start after clear()
        (curved(layer(x)).sum() * scale).backward()
    same(parts[layer], whole[layer])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@some_cases
def test_a_layer_used_twice_sees_one_batch(case: Case, reduction: str) -> None:
    layer, x1, x2 = extend(case.layer()), case.input(), case.input()[:2]
    once, twice = KFACFactors(reduction), KFACFactors(reduction)
    scale = 1 / (len(x1) + len(x2)) if reduction == "mean" else 1.0
    with backpack(once):
        (curved(layer(torch.cat((x1, x2)))).sum() * scale).backward()
    with backpack(twice):
        ((curved(layer(x1)).sum() + curved(layer(x2)).sum()) * scale).backward()
    same(twice[layer], once[layer])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@some_cases
def test_the_traces_of_a_layer_used_twice_are_those_of_one_batch(case: Case, reduction: str) -> None:
    layer, x1, x2 = extend(case.layer()), case.input(), case.input()[:2]
    once, twice = FactorTraces(reduction), FactorTraces(reduction)
    scale = 1 / (len(x1) + len(x2)) if reduction == "mean" else 1.0
    with backpack(once):
        (curved(layer(torch.cat((x1, x2)))).sum() * scale).backward()
    with backpack(twice):
        ((curved(layer(x1)).sum() + curved(layer(x2)).sum()) * scale).backward()
    assert_close(twice[layer].A, once[layer].A, 1e-13)
    assert_close(twice[layer].G, once[layer].G, 1e-13)


def test_calls_with_different_numbers_of_locations() -> None:
    """Data have equal weight in Ω; Γ is a mean over the locations of all data."""
    layer: Any = extend(nn.Conv1d(2, 3, 3, dtype=F64))
    x1, x2, factors = torch.randn(4, 2, 7, dtype=F64), torch.randn(2, 2, 12, dtype=F64), KFACFactors()
    with backpack(factors):
        h1, h2 = layer(x1), layer(x2)
        h1.retain_grad(), h2.retain_grad()
        ((curved(h1).sum() + curved(h2).sum()) / 6).backward()
    a = [ref.patches(layer, x).flatten(0, 1) for x in (x1, x2)]
    g = [6 * ref.outputs(layer, h.grad).flatten(0, 1) for h in (h1, h2)]
    q = factors[layer]
    assert q.num_data == 6 and q.num_locations == pytest.approx((4 * 5 + 2 * 10) / 6)
    assert_close(q.Omega, sum(v.T @ v for v in a) / 6, 1e-13)
    assert_close(q.Gamma, sum(v.T @ v for v in g) / (4 * 5 + 2 * 10), 1e-13)


def test_subsampled_factors_are_those_of_these_data() -> None:
    layer, x, factors, part = extend(nn.Linear(5, 4, dtype=F64)), torch.randn(6, 5, dtype=F64), KFACFactors(), None
    with backpack(factors):
        curved(layer(x[[1, 4, 5]])).mean().backward()
    part = KFACFactors(subsampling=[1, 4, 5])
    with backpack(part):
        curved(layer(x)).mean().backward()
    same(part[layer], factors[layer])


# ------------------------------------------------------------------ Γ in expectation, and other packages


def cnn() -> nn.Sequential:
    """What BackPACK's and curvlinops' KFAC can both do."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 4, 5),
        nn.Sigmoid(),
        nn.Linear(5, 3),
    ).double()


LAYERS = ("0", "2", "5", "7")
x_cnn, y_cnn = torch.randn(6, 2, 6, 6, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), y_cnn),
    "squared error": (nn.MSELoss(), torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(1))),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def root_losses(name: str, output: Tensor) -> list[Tensor]:
    """Per datum: losses whose gradients' second moments add up to the expectation over targets."""
    if name == "cross entropy":  # the loss for each class, times the root of its probability
        p = output.detach().softmax(1)
        return [p[:, c].sqrt() * F.cross_entropy(output, torch.full_like(y_cnn, c), reduction="none") for c in range(3)]
    return [output[:, c] * (2 / 3) ** 0.5 for c in range(3)]  # the mean of three squares has the Hessian ⅔ I


def expected_factors(model: nn.Module, name: str) -> dict[str, KroneckerFactors]:
    """Ω, and Γ in expectation over the targets."""
    model, factors = extend(copy.deepcopy(model)), KFACFactors()
    sums: dict[str, Tensor] = {}
    for c in range(3):
        with backpack(factors):
            root_losses(name, model(x_cnn))[c].mean().backward()
        for layer in LAYERS:
            Gamma = factors[model.get_submodule(layer)].Gamma
            sums[layer] = sums[layer] + Gamma if layer in sums else Gamma
    return {
        layer: KroneckerFactors(q.Omega, sums[layer], q.num_data, q.num_locations)
        for layer in LAYERS
        for q in [factors[model.get_submodule(layer)]]
    }


def curvlinops_factors(model: nn.Module, name: str, joint: bool = True, **options: Any) -> KFACLinearOperator:
    loss, y = LOSSES[name]
    operator = KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(x_cnn, y)],
        separate_weight_and_bias=not joint,
        check_deterministic=False,  # the check would add to the factors already
        **options,
    )
    operator.compute_kronecker_factors()
    return operator


@pytest.mark.parametrize("joint", [True, False], ids=["[W, b]", "W and b apart"])
@each_loss
def test_factors_equal_those_of_curvlinops_in_expectation(name: str, joint: bool) -> None:
    """Its "expand" has Ω / |T| and |T| Γ, so that the products are equal."""
    model = cnn()
    operator = curvlinops_factors(model, name, joint, fisher_type="type-2")
    for layer, q in expected_factors(model, name).items():
        Omega = q.Omega if joint else q.Omega[:-1, :-1]
        assert_close(operator._input_covariances[layer] * q.num_locations, Omega, 1e-12)
        assert_close(operator._gradient_covariances[layer] / q.num_locations, q.Gamma, 1e-12)


@each_loss
def test_sampled_factors_tend_to_the_expectation(name: str) -> None:
    """Ours from targets that a Minibatch samples, and curvlinops' Monte Carlo."""
    model, (loss, y) = cnn(), LOSSES[name]
    want, factors, repeat = expected_factors(model, name), KFACFactors(), 3000
    operator = curvlinops_factors(model, name, fisher_type="mc", mc_samples=500)
    extend(model)
    x, y = x_cnn.repeat(repeat, 1, 1, 1), y.repeat(repeat, *(1,) * (y.ndim - 1))
    with backpack(factors):
        Minibatch(model, loss, x, y).sampled(seed=0)
    for layer, q in want.items():
        got = factors[model.get_submodule(layer)]
        assert_close(got.Omega, q.Omega, 1e-12)
        assert_close(got.Gamma, q.Gamma, 0.05)  # 18,000 samples
        assert_close(operator._gradient_covariances[layer] / q.num_locations, got.Gamma, 0.15)  # 3,000 samples


@each_loss
def test_factors_compared_with_those_of_backpack(name: str) -> None:
    """BackPACK's KFLR is the expectation, its KFAC samples; both are [B, A], and A is Ω without the homogeneous 1.

    B is |T| Γ where |T| = 1. A convolution's sums over locations first, so it has terms from pairs of them:
    B = E[(Σ_t ∂h_t)(Σ_t ∂h_t)ᵀ].
    """
    plain, (loss, y) = cnn(), LOSSES[name]
    want = expected_factors(plain, name)
    model, loss = stock_extend(copy.deepcopy(plain)), stock_extend(copy.deepcopy(loss))
    with backpack(KFLR(), BackpackKFAC(mc_samples=3000)):
        loss(model(x_cnn), y).backward()
    outputs: dict[str, Tensor] = {}
    for layer in LAYERS:
        plain.get_submodule(layer).register_forward_hook(
            lambda module, args, output, layer=layer: outputs.__setitem__(layer, output)
        )
    gradients = [
        torch.autograd.grad(root.sum(), list(outputs.values()), retain_graph=True)
        for root in root_losses(name, plain(x_cnn))
    ]
    for i, layer in enumerate(outputs):
        g = [ref.outputs(plain.get_submodule(layer), by_layer[i]).sum(1) for by_layer in gradients]
        B_want = sum(v.T @ v for v in g) / len(x_cnn)
        if want[layer].num_locations == 1:
            assert_close(B_want, want[layer].Gamma, 1e-12)
        weight: Any = model.get_submodule(layer).weight
        for savefield, tol in (("kflr", 1e-12), ("kfac", 0.15)):
            B, A = getattr(weight, savefield)
            assert_close(A, want[layer].Omega[:-1, :-1], 1e-12)
            assert_close(B, B_want, tol)


# ------------------------------------------------------------------ where one Kronecker product is exact


def ggn_block(model: nn.Module, layer: Any, x: Tensor, output_hessian: float) -> Tensor:
    """Mean over data of Jᵀ H J for one layer's W, in the order of vec(W) (columns stacked), H = c · I."""
    W = ref.weight_matrix(layer)

    def run(vec: Tensor) -> Tensor:
        matrix = vec.reshape(W.shape[1], W.shape[0]).T
        parameters = {"weight": matrix[:, : W.shape[1] - (layer.bias is not None)].reshape(layer.weight.shape)}
        if layer.bias is not None:
            parameters["bias"] = matrix[:, -1]
        name = next(n for n, m in model.named_modules() if m is layer)
        return torch.func.functional_call(model, {f"{name}.{k}": v for k, v in parameters.items()}, (x,)).flatten(1)

    J = torch.autograd.functional.jacobian(run, W.T.reshape(-1))  # [N, K, p]
    return output_hessian * torch.einsum("nki,nkj->ij", J, J) / len(x)


def summed_square(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().flatten(1).sum(1).mean()


def exact_factors(model: nn.Module, x: Tensor) -> KFACFactors:
    """Γ in expectation over Gaussian targets: one output at a time, with the root of the Hessian 2 I."""
    factors, sums = KFACFactors(), {}
    size = model(x).flatten(1).shape[1]
    for k in range(size):
        with backpack(factors):
            (model(x).flatten(1)[:, k] * 2**0.5).mean().backward()
        for module in model.modules():
            if module in factors:
                sums[module] = sums.get(module, 0.0) + factors[module].Gamma
    for module, Gamma in sums.items():
        factors[module].Gamma.copy_(Gamma)
    return factors


def deep_linear() -> tuple[nn.Sequential, Tensor]:
    """Every datum has the same G, whatever its input."""
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 2)), torch.randn(7, 4)


def one_datum() -> tuple[nn.Sequential, Tensor]:
    """An expectation of one product is the product."""
    layers = nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2)
    return nn.Sequential(*layers), torch.randn(1, 4)


def pointwise_convolution() -> tuple[nn.Sequential, Tensor]:
    """Locations do not mix and have equal G, so the sum over them is |T| times a product of means: eq_2.5."""
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1, bias=False)), torch.randn(5, 3, 3, 2)


@pytest.mark.parametrize("make", [deep_linear, one_datum, pointwise_convolution])
def test_the_product_of_the_factors_is_the_exact_ggn_block(make: Any) -> None:
    torch.set_default_dtype(F64)
    try:
        model, x = make()
    finally:
        torch.set_default_dtype(torch.float32)
    factors = exact_factors(extend(model), x)
    for layer in model:
        if isinstance(layer, ref.LAYERS):
            q = factors[layer]
            assert_close(torch.kron(q.Omega, q.Gamma), ggn_block(model, layer, x, 2.0), 1e-12)


def test_and_it_is_not_exact_elsewhere() -> None:
    """The three cases above are special: two data and a nonlinearity are enough to need the approximation."""
    model, _ = one_datum()
    model, x = extend(model.double()), torch.randn(2, 4, dtype=F64)
    q, exact = exact_factors(model, x)[model[0]], ggn_block(model, model[0], x, 2.0)
    assert (torch.kron(q.Omega, q.Gamma) - exact).norm() > 0.05 * exact.norm()


def test_in_the_deep_linear_net_it_is_the_exact_hessian_block() -> None:
    """With squared loss and a linear model, the Hessian is the Gauss-Newton matrix."""
    model, x = deep_linear()
    model, x = extend(model.double()), x.double()
    y, layer = torch.randn(7, 2, dtype=F64), model[0]
    q = exact_factors(model, x)[layer]
    W = ref.weight_matrix(layer)

    def loss(vec: Tensor) -> Tensor:
        matrix = vec.reshape(W.shape[1], W.shape[0]).T
        parameters = {"0.weight": matrix[:, :-1], "0.bias": matrix[:, -1]}
        return summed_square(torch.func.functional_call(model, parameters, (x,)), y)

    exact = torch.autograd.functional.hessian(loss, W.T.reshape(-1))
    assert_close(torch.kron(q.Omega, q.Gamma), exact, 1e-12)
