"""Calls of a layer and passes through them: shared modules, several losses, checkpoints, other people's hooks."""

from collections.abc import Callable
from typing import Any

import backpack as stock
import pytest
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import InputGram, KBFGSQuantities, LayerMoments, extend
from tests.cases import assert_close

F64 = torch.float64
# With the shapes of a datum in one call and in the next.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 3, dtype=F64), (3,), (3,)),
    "locations": (lambda: nn.Linear(3, 3, dtype=F64), (5, 3), (8, 3)),
    "convolution": (lambda: nn.Conv1d(2, 2, 3, padding=1, dtype=F64), (2, 6), (2, 11)),
}


def same(got: LayerMoments, want: LayerMoments) -> None:
    assert (got.num_data, got.num_locations) == (want.num_data, want.num_locations)
    s = torch.ones_like(want.a_bar)
    for name in ("a_bar", "h_bar", "dh_bar"):
        assert_close(getattr(got, name), getattr(want, name), 1e-12)
    assert_close(got.A @ s, want.A @ s, 1e-12)


def losses(outputs: list[Tensor], reduction: str) -> list[Tensor]:
    mean = 1.0 if reduction == "sum" else 1.0 / sum(map(len, outputs))
    return [sum(mean * term(h).sum() for h in outputs) for term in (torch.square, torch.sin)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_several_losses_of_several_calls(name: str, calls: int, reduction: str) -> None:
    """As one loss, their sum; also where calls have batches of different shape, or one tensor as their input."""
    build, shape, other = LAYERS[name]
    layer = extend(build())
    first = torch.randn(4, *shape, dtype=F64)
    inputs = [first, torch.randn(7, *other, dtype=F64), first][:calls]
    found = []
    for apart in (False, True):
        moments, gram = KBFGSQuantities(reduction, accumulate=apart), InputGram(accumulate=apart)
        with backpack(moments, gram):
            terms = losses([layer(x) for x in inputs], reduction)
            for term in terms if apart else [terms[0] + terms[1]]:
                term.backward(retain_graph=True)
        found.append((moments[layer], gram[layer]))
    (want, want_gram), (got, got_gram) = found
    assert want.num_data == sum(len(x) for x in inputs)
    same(got, want)
    assert (got.dh_noise >= 0.9 * want.dh_noise).all()  # the bounds of the terms add up
    assert_close(got_gram.A, want_gram.A, 1e-12)


@pytest.mark.parametrize("how", [extend, stock.extend], ids=["extend", "stock"])
def test_two_passes_over_one_tensor_are_two_batches(how: Any) -> None:
    layer, x = how(nn.Linear(3, 3, dtype=F64)), torch.randn(4, 3, dtype=F64)
    moments = KBFGSQuantities("sum", accumulate=True)
    for _ in range(2):
        with backpack(moments):
            layer(x).square().sum().backward()
    assert moments[layer].num_data == 8
    assert_close(8 * moments[layer].dh_bar, layer.bias.grad, 1e-12)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_shared_module_in_checkpoints(reentrant: bool, accumulate: bool) -> None:
    layer = extend(nn.Linear(3, 3, dtype=F64))
    x = torch.randn(4, 3, dtype=F64, requires_grad=True)

    def block(h: Tensor) -> Tensor:
        return layer(h).tanh()

    found = []
    for run in (block, lambda h: checkpoint(block, h, use_reentrant=reentrant)):
        moments = KBFGSQuantities(accumulate=accumulate)
        with backpack(moments):
            run(run(x)).square().mean().backward()
        found.append(moments[layer])
    assert found[0].num_data == 8
    same(found[1], found[0])


@pytest.mark.parametrize(
    "change", [lambda o: 10 * o, lambda o: o.transpose(0, 1), lambda o: o[:, :1], lambda o: (o, 1)]
)
def test_the_layer_s_own_output_whatever_another_hook_makes_of_it(change: Callable[[Tensor], Any]) -> None:
    layer, moments = nn.Linear(5, 4, dtype=F64), KBFGSQuantities("sum")
    layer.register_forward_hook(lambda module, args, output: change(output))
    extend(layer)
    with backpack(moments):
        out = layer(torch.randn(6, 5, dtype=F64))
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    assert moments[layer].num_data == 6
    assert_close(6 * moments[layer].dh_bar, layer.bias.grad, 1e-12)


class Modified(nn.Module):
    """x + layer(x), in place on the layer's input; autograd itself keeps a copy of x, or nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x
        x += self.layer(x)
        return x


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (4, 2, 6)),
        (nn.Conv1d(2, 2, 2, padding="same"), (4, 2, 6)),
        (nn.Linear(3, 3), (4, 3)),
    ],
    ids=["circular", "same", "autocast"],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_an_input_that_is_modified_is_never_measured_modified(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, autocast = extend(Modified(layer)), isinstance(layer, nn.Linear)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(torch.randn(shape)).square().sum()
    loss.backward(retain_graph=True)  # without an extension nothing is read
    kind = type(layer).__name__
    with (
        pytest.raises(RuntimeError, match=rf"(?s){kind}.*modified in place.*x = x \+ layer\(x\)"),
        backpack(KBFGSQuantities()),
    ):
        loss.backward()


def test_a_frozen_layer_s_input_may_be_modified() -> None:
    """It is not measured, so nothing is to be said about it."""
    model, moments = extend(nn.Sequential(nn.Linear(3, 3), Modified(nn.Linear(3, 3)))), KBFGSQuantities()
    model[1].layer.weight.requires_grad_(False)
    with backpack(moments):
        model(torch.randn(4, 3)).sum().backward()
    assert model[0] in moments and model[1].layer not in moments


def test_passes_that_go_on_are_passed_over() -> None:
    layer, x, moments = extend(nn.Linear(3, 2)), torch.randn(4, 3, requires_grad=True), KBFGSQuantities()
    with backpack(moments):
        h = layer(x)
        rows = torch.autograd.grad(h, x, torch.eye(8).reshape(8, 4, 2), is_grads_batched=True, retain_graph=True)
        assert rows[0].shape == (8, 4, 3)
        torch.autograd.functional.jacobian(layer, x, vectorize=True)
        torch.func.jacrev(layer)(x)
        torch.func.vmap(layer)(x)
        parameters = {name: p.detach() for name, p in layer.named_parameters()}
        torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(parameters)
    assert layer not in moments
    with backpack(moments):
        h.sum().backward()
    assert moments[layer].num_data == 4


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_tracing_an_extended_model() -> None:
    layer, x = extend(nn.Linear(3, 2)), torch.randn(4, 3)
    assert torch.equal(torch.jit.trace(layer, x)(x), layer(x))


def test_attributes_of_the_user_s_own_survive() -> None:
    layer: Any = extend(nn.Linear(3, 2))
    layer.output, layer.input0 = "mine", "mine too"
    with backpack(KBFGSQuantities()):
        layer(torch.randn(4, 3)).sum().backward()
    assert (layer.output, layer.input0) == ("mine", "mine too")


def test_clearing_takes_results_off_the_weights() -> None:
    layer, one, two = extend(nn.Linear(3, 2)), KBFGSQuantities(), KBFGSQuantities()
    for moments in (one, two):
        with backpack(moments):
            layer(torch.randn(4, 3)).sum().backward()
    one.clear()
    assert layer.weight.kbfgs is two[layer]  # another's stays
    two.clear()
    assert not hasattr(layer.weight, "kbfgs") and layer not in two


def test_an_empty_batch_leaves_no_older_result() -> None:
    layer, moments = extend(nn.Linear(3, 2)), KBFGSQuantities()
    for shape, there in (((4, 3), True), ((0, 3), False), ((4, 3), True), ((4, 0, 3), False)):
        with backpack(moments):
            layer(torch.randn(shape)).sum().backward()
        assert (layer in moments) == hasattr(layer.weight, "kbfgs") == there


def test_no_locations_beside_some() -> None:
    layer, x, moments = extend(nn.Linear(3, 2)), torch.randn(4, 5, 3), KBFGSQuantities()
    with backpack(moments):
        (layer(x).sum() + layer(x[:, :0]).sum()).backward()
    assert (moments[layer].num_data, moments[layer].num_locations) == (4, 5)
