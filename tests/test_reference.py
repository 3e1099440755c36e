"""The oracle itself: its identities hold to rounding, so that a disagreement with it is a finding."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import reference as ref

F64 = torch.float64
CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# One value per spatial dimension, as many as the convolution has; sizes 7, 6, 5.
KERNELS, STRIDES, DILATIONS, SIZES = (
    [(1, 1, 1), (3, 2, 3), (2, 4, 2)],
    [(1, 1, 1), (2, 3, 2)],
    [(1, 1, 1), (2, 1, 2)],
    (7, 6, 5),
)


def geometries() -> list[Any]:
    cases = []
    for dims, kernel, stride, dilation in itertools.product((1, 2, 3), KERNELS, STRIDES, DILATIONS):
        for groups, bias, padding in itertools.product((1, 2, 4), (True, False), ("valid", "same", 0, (2, 1, 2))):
            if padding == "same" and stride != (1, 1, 1):
                continue  # torch has no such convolution
            modes = ["zeros"] if padding in ("valid", 0) else ["zeros", "circular", "reflect", "replicate"]
            for mode in modes:
                amount = padding[:dims] if isinstance(padding, tuple) else padding
                keywords = {"stride": stride[:dims], "dilation": dilation[:dims], "padding": amount}
                cases.append((dims, kernel[:dims], {**keywords, "groups": groups, "bias": bias, "padding_mode": mode}))
    return cases


def check_layer(layer: Any, x: Tensor) -> None:
    """h_t = W a_t, and Σ g aᵀ is autograd's gradient."""
    h = layer(x)
    a, W = ref.patches(layer, x), ref.weight_matrix(layer)
    torch.testing.assert_close(torch.einsum("...ij,nt...j->nt...i", W, a), ref.outputs(layer, h), rtol=0, atol=1e-12)
    g = torch.randn_like(h)
    grads = torch.autograd.grad(h, [*layer.parameters()], g)
    by_name = dict(zip([name for name, _ in layer.named_parameters()], grads, strict=True))
    DW = ref.as_matrix(layer, by_name["weight"], by_name.get("bias"))
    seen = ref.Layer(layer, x, h.detach(), g)
    torch.testing.assert_close(seen.DW, DW, rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.einsum("...ij,...j->...i", W, seen.a_bar), seen.h_bar, rtol=0, atol=1e-12)
    ref.set_weight_matrix(layer, 2 * W)
    torch.testing.assert_close(layer(x), 2 * h, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_patches_of_every_convolution() -> None:
    for dims, kernel, keywords in geometries():
        layer = CONVS[dims](4, 8, kernel, dtype=F64, **keywords)
        try:
            check_layer(layer, torch.randn(3, 4, *SIZES[:dims], dtype=F64))
        except AssertionError as error:
            raise AssertionError(f"{layer}: {error}") from error
    check_layer(nn.Conv2d(4, 8, 3, padding=1, dtype=F64), torch.randn(4, 7, 6, dtype=F64))  # unbatched


@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 2, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    check_layer(nn.Linear(5, 4, bias=bias, dtype=F64), torch.randn(shape, dtype=F64))


def net() -> nn.Module:
    """Strides, groups, BatchNorm, dropout, an in-place activation: all that makes a second pass differ."""
    layers = [nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(4, 6, 3, padding="same", groups=2)]
    layers += [nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten(), nn.Linear(96, 10)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 2, 8, 8, dtype=F64), torch.randint(10, (16,))


def test_capture_is_one_backward_pass() -> None:
    model, (x, y) = net(), batch()
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    seen = ref.capture(model, nn.functional.cross_entropy, x, y)
    torch.set_rng_state(state)
    loss = nn.functional.cross_entropy(twin(x), y)
    loss.backward()
    torch.testing.assert_close(seen.loss, loss.detach())
    for name, layer in seen.layers.items():
        module: Any = twin.get_submodule(name)
        torch.testing.assert_close(layer.DW, ref.as_matrix(module, module.weight.grad, module.bias.grad))
        torch.testing.assert_close(layer.dh_bar.flatten() * layer.num_locations, module.bias.grad)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(seen.grads[name], p.grad)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    again = ref.replay(model, nn.functional.cross_entropy, x, y, state)
    assert torch.equal(again.output, seen.output)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("blocks", [(), (3,)])
@pytest.mark.parametrize("seed", range(20))
def test_bfgs_and_damping(seed: int, blocks: tuple[int, ...]) -> None:
    torch.manual_seed(seed)
    d, mu1, mu2 = 5, 0.2, 10 ** (2 * torch.rand(()).item() - 1)
    root = torch.randn(*blocks, d, d, dtype=F64)
    H = root @ root.mT + 0.1 * torch.eye(d, dtype=F64)
    s, y = torch.randn(2, *blocks, d, dtype=F64)

    def quadratic(v: Tensor) -> Tensor:
        return torch.einsum("...i,...ij,...j->...", v, H, v)

    def at_least(left: Tensor, right: Tensor) -> bool:
        return bool((left >= right - 1e-10 * (1 + right.abs())).all())

    s1, y1 = ref.powell_lm(s, y, H, mu1, mu2)
    assert at_least((s1 * y).sum(-1), mu1 * quadratic(y))  # dd.tex: s̃ᵀy ≥ μ₁ yᵀHy
    assert at_least((s1 * y1).sum(-1), mu2 * (s1 * s1).sum(-1))
    plus = ref.bfgs(H, s1, y1)
    torch.testing.assert_close(torch.einsum("...ij,...j->...i", plus, y1), s1, rtol=1e-8, atol=1e-8)
    assert (torch.linalg.eigvalsh(plus) > 0).all()

    s2, y2 = ref.powell_identity_lm(s, y, mu1, mu2)  # lemma_3
    mu3 = mu1 / (mu2 * (1 + 2 * mu1))
    assert at_least((s2 * y2).sum(-1), mu2 * (s2 * s2).sum(-1))
    assert at_least((s2 * y2).sum(-1), mu3 * (y2 * y2).sum(-1))
    identity = (torch.eye(d, dtype=F64) / mu2).expand_as(H)
    for got, want in zip((s2, y2), ref.powell_lm(s, y, identity, mu1, mu2), strict=True):
        torch.testing.assert_close(got, want)

    s3, y3 = ref.double_damping_2020(s, y, H, mu1, min(mu2, 1.0))
    torch.testing.assert_close(s3, s1)
    assert at_least((s3 * y3).sum(-1), min(mu2, 1.0) * (s3 * s3).sum(-1))


KBFGS20: dict[str, Any] = {"pair_damping": "2020", "moving_A": True, "split": "equal", "H_G0": "identity"}


def run(cls: Any, steps: int = 10, **keywords: Any) -> tuple[list[float], Any, nn.Module]:
    torch.manual_seed(0)
    model, (x, y) = net(), batch()
    optimizer = cls(model, nn.functional.cross_entropy, **keywords)
    return [optimizer.step(x, y).item() for _ in range(steps)], optimizer, model


def sample(output: Tensor) -> Tensor:
    noise = torch.rand(output.shape, dtype=F64, generator=torch.Generator().manual_seed(3))
    return (output - (-noise.log()).log()).argmax(-1)  # Gumbel


@pytest.mark.parametrize(
    ("cls", "keywords"),
    [
        (ref.ReferenceKBFGS, {}),
        (ref.ReferenceKBFGS, {"T": 3, "weight_decay": 1e-3}),
        (ref.ReferenceKBFGS, {"memory": 4}),
        (ref.ReferenceKBFGS, KBFGS20),
        (ref.ReferenceKBFGS, {**KBFGS20, "memory": 4}),
        (ref.ReferenceKBFGS, {"frozen_G": ["2"]}),
        (ref.ReferenceProvable, {"memory": 4}),
        (ref.ReferenceKFAC, {"sample_targets": sample, "lr": 0.03}),
        (ref.ReferenceKFAC, {"sample_targets": sample, "lr": 0.03, "order": "statistics_first", "T1": 2, "T2": 4}),
    ],
)
def test_optimizers_lower_the_loss(cls: Any, keywords: dict[str, Any]) -> None:
    losses, optimizer, model = run(cls, **{"lr": 0.1, "damping": 1.0, **keywords})
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0]
    assert set(optimizer.state) == {"0", "2", "7"} and set(optimizer.other) == {"3.weight", "3.bias"}
    batch_norm: Any = model.get_submodule("3")
    assert batch_norm.num_batches_tracked == 10  # once per step, whatever the number of passes


def test_first_step_is_damped_by_the_minibatch() -> None:
    """The first K-BFGS step, written out once more for one linear layer: W − α √|T|/√λ 𝒟W (A + √|T|√λ I)⁻¹."""
    model = nn.Linear(5, 3, dtype=F64)
    x, y = torch.randn(7, 2, 5, dtype=F64), torch.randn(7, 2, 3, dtype=F64)
    before, a = ref.weight_matrix(model), torch.cat([x, torch.ones(7, 2, 1, dtype=F64)], -1).reshape(14, 6)
    nn.functional.mse_loss(model(x), y).backward()
    assert model.weight.grad is not None and model.bias.grad is not None
    DW = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    inverse = torch.linalg.inv(a.T @ a / 7 + math.sqrt(2 * 0.5) * torch.eye(6, dtype=F64))
    ref.ReferenceKBFGS(model, nn.functional.mse_loss, lr=0.1, damping=0.5).step(x, y)
    torch.testing.assert_close(ref.weight_matrix(model), before - 0.1 * math.sqrt(2 / 0.5) * DW @ inverse)


def test_full_memory_is_dense_bfgs() -> None:
    dense, limited = (run(ref.ReferenceKBFGS, lr=0.1, damping=1.0, memory=m, steps=5)[2] for m in (None, 100))
    for p, q in zip(dense.parameters(), limited.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_means_over_data_are_means_of_single_data() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10)).double()
    x, y = batch()
    together = ref.capture(model, nn.functional.cross_entropy, x, y).layers
    alone = [ref.capture(model, nn.functional.cross_entropy, x[i : i + 1], y[i : i + 1]).layers for i in range(16)]
    for name, layer in together.items():
        for quantity in ("a_bar", "h_bar", "dh_bar", "A", "DW", "Gamma"):
            mean = sum(getattr(one[name], quantity) for one in alone) / 16
            torch.testing.assert_close(getattr(layer, quantity), mean)
        datum, G = alone[0][name], torch.zeros_like(layer.Gamma)
        for t in range(datum.num_locations):
            G += datum.g[0, t, ..., :, None] * datum.g[0, t, ..., None, :]
        torch.testing.assert_close(datum.Gamma, G / datum.num_locations)
