"""Exact Hessian and Gauss-Newton blocks against torch.func, curvlinops and BackPACK; models are left as they were."""

import copy
from typing import Any

import backpack
import pytest
import torch
from backpack.extensions import GGNMP
from curvlinops import GGNLinearOperator, HessianLinearOperator
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

from kfqn_ext import extend
from kfqn_ext.curvature import exact_block, exact_ggn_block, exact_output_hessians
from kfqn_ext.curvature.problem import LayerLoss, layer_names
from kfqn_ext.curvature.products import GGNProduct, HessianProduct
from kfqn_ext.errors import UnsupportedLayerError
from tests import reference as ref
from tests.curvature.nets import CLASSES, F64, LOSSES, N, images, residual


def plain() -> tuple[nn.Module, Tensor, Tensor]:
    """What BackPACK's second-order extensions can do: a chain of modules."""
    x, y = images(2, 6, 6)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.Sigmoid(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, stride=2, padding=1)]
    layers += [nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, CLASSES)]
    return nn.Sequential(*layers).double(), x, y


def paper_order(module: Any, flat: Tensor) -> Tensor:
    """Matrices on [weight.flatten(), bias] → on vec(W), one block a channel group; written without the package."""
    sizes = [p.numel() for p in module.parameters()]
    parts = torch.arange(sum(sizes)).split(sizes)
    W = ref.as_matrix(module, parts[0].reshape(module.weight.shape), parts[1] if len(parts) > 1 else None)
    index = W.mT.flatten(-2)
    return torch.stack([flat[i][:, i] for i in index]) if index.ndim > 1 else flat[index][:, index]


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("layer", ["first", "second", "last"])
def test_block_equals_torch_func(layer: str, mode: str) -> None:
    """On a copy that is not extended: cross terms of channel groups included in torch's order."""
    model, x, y = residual(nn.Tanh(), groups=2)
    model.train(mode == "train")
    model.dropout.p = 0.0  # torch.func has another stream of random numbers
    copied = copy.deepcopy(model)
    extend(model)
    parameters = dict(copied.get_submodule(layer).named_parameters(prefix=layer))
    shapes = [p.shape for p in parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        tensors = [t.reshape(s) for t, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        return cross_entropy(functional_call(copied, dict(zip(parameters, tensors, strict=True)), (x,)), y)

    for norm in [m for m in copied.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.track_running_stats = mode == "eval"  # torch.func cannot update buffers in place
        if mode == "train":
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    expected = hessian(loss)(torch.cat([p.detach().flatten() for p in parameters.values()]))
    found = exact_block(model, cross_entropy, x, y, layer, order="torch")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    module = model.get_submodule(layer)
    torch.testing.assert_close(
        exact_block(model, cross_entropy, x, y, module), paper_order(module, expected), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("layer", ["0", "3", "6", "8"])
@pytest.mark.parametrize("operator", ["Hessian", "GGN"])
def test_blocks_equal_curvlinops(operator: str, layer: str) -> None:
    model, x, y = plain()
    extended = extend(copy.deepcopy(model))
    parameters = [*model.get_submodule(layer).parameters()]
    kind = {"Hessian": HessianLinearOperator, "GGN": GGNLinearOperator}[operator]
    linear = kind(model, nn.CrossEntropyLoss(), parameters, [(x, y)])
    expected = linear @ torch.eye(linear.shape[0], dtype=F64)
    ours = {"Hessian": exact_block, "GGN": exact_ggn_block}[operator]
    found = ours(extended, cross_entropy, x, y, layer, order="torch")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        ours(extended, cross_entropy, x, y, layer),
        paper_order(model.get_submodule(layer), expected),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_gauss_newton_equals_backpack(loss: nn.Module) -> None:
    model, x, y = plain()
    target = y if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(N, CLASSES, dtype=F64)
    stock = backpack.extend(copy.deepcopy(model))
    with backpack.backpack(GGNMP(), retain_graph=True):  # its products are lazy
        backpack.extend(copy.deepcopy(loss))(stock(x), target).backward(retain_graph=True)
    for name in ("0", "3", "6"):
        weight = stock.get_submodule(name).weight
        block = exact_ggn_block(model, loss, x, target, name, order="torch")
        identity = torch.eye(weight.numel(), dtype=F64).reshape(-1, *weight.shape)
        expected = weight.ggnmp(identity).reshape(weight.numel(), weight.numel())
        torch.testing.assert_close(block[: weight.numel(), : weight.numel()], expected, rtol=1e-9, atol=1e-12)


def test_piecewise_linear_networks_have_equal_hessian_and_gauss_newton_blocks() -> None:
    model, x, y = residual(nn.ReLU(inplace=True))
    for layer in ("first", "second", "last"):
        torch.testing.assert_close(
            exact_block(model, cross_entropy, x, y, layer), exact_ggn_block(model, cross_entropy, x, y, layer)
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_products_equal_blocks(loss: str) -> None:
    """Also with channel groups, where a product keeps them apart."""
    model, x, y = residual(nn.Tanh(), groups=2)
    for kind, form in ((HessianProduct, exact_block), (GGNProduct, exact_ggn_block)):
        for layer in ("first", "second"):
            problem = LayerLoss(model, LOSSES[loss], x, y, layer)
            product, B = kind(problem), form(model, LOSSES[loss], x, y, layer)
            V = torch.randn_like(problem.W)
            expected = torch.einsum("...pq,...q->...p", B, V.mT.flatten(-2))
            torch.testing.assert_close(product(V).mT.flatten(-2), expected, rtol=1e-9, atol=1e-12)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(id(p), p.detach().clone(), p.requires_grad, id(p.grad)) for p in model.parameters()],
        "buffers": [(id(b), b.clone()) for b in model.buffers()],
        "hooks": [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
        "mode": [m.training for m in model.modules()],
        "random": torch.get_rng_state(),
        "names": list(model.state_dict()),
    }


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("form", [exact_block, exact_ggn_block, exact_output_hessians])
def test_everything_is_left_untouched(form: Any, mode: str) -> None:
    """Gradients, buffers, random numbers, frozen parameters, mode, hooks; the input too."""
    model, x, y = residual(nn.ReLU(inplace=True))
    extend(model).train(mode == "train")
    cross_entropy(model(x), y).backward()
    if form is exact_output_hessians:
        model.norm.eval()  # data must not be coupled
    model.first.weight.requires_grad_(False)
    model.second.requires_grad_(False)
    before, x_before = snapshot(model), x.clone()
    for layer in ("first", "second"):
        form(model, cross_entropy, x, y, layer)
    after = snapshot(model)
    assert before.keys() == after.keys()
    for key in before:
        same(after[key], before[key])
    assert torch.equal(x, x_before)


def same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for p, q in zip(a, b, strict=True):
            same(p, q)
    else:
        assert a == b


def test_dropout_is_the_one_of_this_moment_in_every_pass() -> None:
    model, x, y = residual(nn.Tanh())
    model.train()
    first, second = (exact_block(model, cross_entropy, x, y, "last") for _ in range(2))
    assert torch.equal(first, second)
    torch.rand(1)
    assert not torch.equal(first, exact_block(model, cross_entropy, x, y, "last"))


def test_float32_models_are_computed_in_float64() -> None:
    model, x, y = residual(nn.Tanh())
    single = copy.deepcopy(model).float()
    x = x.float()
    block = exact_block(single, cross_entropy, x, y, "first")
    assert block.dtype == F64 and single.first.weight.dtype == torch.float32
    torch.testing.assert_close(block, exact_block(single.double(), cross_entropy, x.double(), y, "first"))
    low = exact_block(single.float(), cross_entropy, x, y, "first", dtype=None)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, block.float(), rtol=1e-3, atol=1e-4)


def test_inputs_and_outputs_may_be_nested() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            return {"score": torch.tanh(self.inner(batch["parts"][0]))}

    model, x = Nested(), ({"parts": [torch.randn(N, 3)]},)
    block = exact_block(model, lambda z, y: (z["score"] - y).square().mean(), x, torch.randn(N, 2), "inner")
    assert block.shape == (8, 8) and float((block - block.T).abs().max()) < 1e-15
    with pytest.raises(TypeError, match="The model returns a dict"):
        exact_ggn_block(model, lambda z, y: (z["score"] - y).square().mean(), x, torch.randn(N, 2), "inner")


def test_a_linear_loss_has_no_curvature() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)).double(), torch.randn(N, 3, dtype=F64)
    for form in (exact_block, exact_ggn_block, exact_output_hessians):
        assert not form(model, lambda z, y: z.mean(), x, None, "0").any()


def test_compiled_models_are_unwrapped() -> None:
    model, x, y = residual(nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    expected = exact_block(model, cross_entropy, x, y, "first")
    assert torch.equal(exact_block(compiled, cross_entropy, x, y, "first"), expected)
    assert layer_names(compiled) == ["first", "second", "last"]


def test_mistakes_are_named() -> None:
    model, x, y = residual(nn.Tanh())
    with pytest.raises(ValueError, match="no layer 'conv1'.*first, second, last"):
        exact_block(model, cross_entropy, x, y, "conv1")
    with pytest.raises(ValueError, match="no layer Linear"):
        exact_block(model, cross_entropy, x, y, nn.Linear(2, 2))
    with pytest.raises(UnsupportedLayerError, match="Layer norm cannot be measured: BatchNorm2d"):
        exact_block(model, cross_entropy, x, y, "norm")
    with pytest.raises(ValueError, match="order='rows'"):
        exact_block(model, cross_entropy, x, y, "first", order="rows")
    with pytest.raises(ValueError, match="loss has shape"):
        exact_block(model, lambda z, y: cross_entropy(z, y, reduction="none"), x, y, "first")
    with pytest.raises(MemoryError, match=r"layer first \(76 parameters\).*estimate_curvature"):
        exact_block(model, cross_entropy, x, y, "first", memory_budget=1000)
    with pytest.raises(MemoryError, match=r"G_\{t,t'\} of layer first.*estimate_curvature"):
        exact_output_hessians(model, cross_entropy, x, y, "first", memory_budget=1000)


def test_unused_and_shared_layers_are_named() -> None:
    model, x, y = residual(nn.Tanh())
    model.unused = nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="Layer unused took no part"):
        exact_output_hessians(model, cross_entropy, x, y, "unused")
    model.copy = nn.Linear(16, CLASSES).double()
    model.copy.weight = model.last.weight
    with pytest.raises(UnsupportedLayerError, match="belong to several modules"):
        exact_block(model, cross_entropy, x, y, "last")


def test_a_network_can_be_one_layer() -> None:
    model, x, y = nn.Linear(3, CLASSES).double(), torch.randn(N, 3, dtype=F64), torch.arange(N) % CLASSES
    block = exact_block(model, cross_entropy, x, y, "")
    assert torch.equal(block, exact_block(model, cross_entropy, x, y, model))
