"""``thm_4``: the exact Hessian block is the sum of Kronecker products, and the gradient a sum of Kronecker products."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfqn_ext import extend
from kfqn_ext.curvature import exact_block, exact_output_hessians
from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import OutputHessian
from kfqn_ext.curvature.sums import kronecker_sums
from tests import reference as ref
from tests.curvature.nets import LOSSES, N, PerLocation, Residual, Twice, images, ready

ACTIVATIONS: dict[str, nn.Module] = {"tanh": nn.Tanh(), "relu": nn.ReLU(inplace=True), "sigmoid": nn.Sigmoid()}
GEOMETRIES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 3), (4,)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (4,)),
    "linear by location": (nn.Linear(4, 3), (3, 4)),
    "linear by locations": (nn.Linear(4, 2), (2, 2, 4)),
    "conv1d, stride, dilation": (nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=1), (2, 8)),
    "conv1d, circular": (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 5)),
    "conv2d, same": (nn.Conv2d(2, 3, 3, padding="same"), (2, 3, 3)),
    "conv2d, stride, no bias": (nn.Conv2d(2, 2, (3, 2), stride=(2, 1), bias=False), (2, 5, 4)),
    "conv2d, reflect, dilation": (nn.Conv2d(1, 3, 2, dilation=2, padding=1, padding_mode="reflect"), (1, 4, 4)),
    "conv2d, groups": (nn.Conv2d(4, 6, 2, groups=2, stride=2), (4, 4, 4)),
    "conv2d, depthwise": (nn.Conv2d(3, 3, 2, groups=3, padding=1), (3, 3, 3)),
    "conv3d, replicate": (nn.Conv3d(1, 2, 2, stride=2, padding=1, padding_mode="replicate"), (1, 3, 3, 2)),
}
Case = tuple[nn.Module, Tensor, Tensor]


def geometry_net(name: str, activation: nn.Module) -> Case:
    layer, shape = GEOMETRIES[name]
    x, y = images(*shape)
    return ready(PerLocation(copy.deepcopy(layer), activation), x), x, y


def brute_force(model: Any, name: str, x: Tensor, G: Tensor, loss_fn: Any, y: Tensor) -> Tensor:
    """(1/N) Σ_n Σ_{t,t'} a_t a_t'ᵀ ⊗ G_{t,t'}(n), with the oracle's patches, one Kronecker product at a time."""
    a = ref.capture(copy.deepcopy(model), loss_fn, x, y).layers[name].a
    blocked = a.ndim == 4
    a, G = (a, G) if blocked else (a.unsqueeze(2), G.unsqueeze(3))
    total = [
        sum(
            torch.kron(torch.outer(a[n, t, b], a[n, u, b]), G[n, t, u, b])
            for n in range(a.shape[0])
            for t in range(a.shape[1])
            for u in range(a.shape[1])
        )
        for b in range(a.shape[2])
    ]
    result = torch.stack([torch.as_tensor(t) for t in total]) / a.shape[0]
    return result if blocked else result[0]


def check(case: Case, layer: str, loss_fn: Any, brute: bool = True) -> None:
    model, x, y = case
    exact = exact_block(extend(model), loss_fn, x, y, layer)
    hessian = OutputHessian(LayerLoss(model, loss_fn, x, y, layer))
    sums = kronecker_sums(hessian).exact
    assert float(exact.abs().max()) > 1e-6
    torch.testing.assert_close(sums.reshape(exact.shape), exact, rtol=1e-10, atol=1e-13)
    if brute:
        G = exact_output_hessians(model, loss_fn, x, y, layer)
        torch.testing.assert_close(brute_force(model, layer, x, G, loss_fn, y), exact, rtol=1e-10, atol=1e-13)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_block_is_sum_of_kronecker_products(geometry: str, activation: str, loss: str) -> None:
    check(geometry_net(geometry, ACTIVATIONS[activation]), "layer", LOSSES[loss], brute=activation == "tanh")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer", ["first", "second", "last"])
def test_residual_net_with_batchnorm(layer: str, activation: str, loss: str) -> None:
    x, y = images(2, 4, 4)
    model = ready(Residual(ACTIVATIONS[activation], groups=2), x)
    check((model, x, y), layer, LOSSES[loss], brute=False)


def test_calls_of_a_layer_are_further_locations() -> None:
    x, y = images(3, 5)
    check((ready(Twice(), x), x, y), "shared", LOSSES["cross entropy"], brute=False)


def test_a_layer_that_feeds_itself_is_refused() -> None:
    """Its patches depend on W, which the theorem does not cover."""
    x, y = images(3, 5)
    model = ready(Twice(feeds_itself=True), x)
    with pytest.raises(ValueError, match="Layer shared is called again on what depends on its own output"):
        exact_output_hessians(model, LOSSES["cross entropy"], x, y, "shared")
    assert exact_block(model, LOSSES["cross entropy"], x, y, "shared").shape == (30, 30)


@pytest.mark.parametrize("layer", ["first", "second", "last"])
def test_batchnorm_in_training_mode_couples_data(layer: str) -> None:
    """The theorem then holds with the minibatch as the one datum, and not datum by datum."""
    x, y = images(2, 4, 4)
    model = ready(Residual(nn.Tanh()), x).train()
    exact = exact_block(model, LOSSES["cross entropy"], x, y, layer)
    hessian = OutputHessian(LayerLoss(model, LOSSES["cross entropy"], x, y, layer))
    sums = kronecker_sums(hessian)
    torch.testing.assert_close(sums.exact[0], exact, rtol=1e-10, atol=1e-13)
    assert hessian.coupled == (layer != "last")
    if hessian.coupled:
        assert float((sums.by_datum[0] - exact).norm() / exact.norm()) > 0.1
        with pytest.raises(ValueError, match=r"model.eval\(\)"):
            exact_output_hessians(model, LOSSES["cross entropy"], x, y, layer)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradient_is_sum_of_kronecker_products(geometry: str) -> None:
    """vec(𝒟W) = Σ_t a_t ⊗ 𝒟h_t, a mean over data."""
    model, x, y = geometry_net(geometry, nn.Tanh())
    loss_fn = LOSSES["cross entropy"]
    hessian = OutputHessian(LayerLoss(model, loss_fn, x, y, "layer"))
    vec = torch.einsum("ntgj,ntgi->gji", hessian.a, hessian.gradient).flatten(1)
    loss_fn(model(x), y).backward()
    layer: Any = model.layer
    W = ref.as_matrix(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    torch.testing.assert_close(vec, W.reshape(-1, *W.shape[-2:]).mT.flatten(1), rtol=0, atol=1e-12)


def test_one_datum_and_one_location_need_no_approximation() -> None:
    """A ⊗ G is then the exact block."""
    x, y = images(2, 3, 3)
    x, y = x[:1], y[:1]
    net = ready(PerLocation(nn.Conv2d(2, 3, 3), nn.Tanh()), x)
    a = ref.patches(net.layer, x)[0, 0]
    G = exact_output_hessians(net, LOSSES["cross entropy"], x, y, "layer")[0, 0, 0]
    exact = exact_block(net, LOSSES["cross entropy"], x, y, "layer")
    torch.testing.assert_close(torch.kron(torch.outer(a, a), G), exact, rtol=1e-10, atol=1e-13)
    assert N > 1
