"""What a call multiplied, with which weights, and the gradient that entered it: whatever others make of these."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from backpack.extensions import BatchGrad
from torch import Tensor, nn
from torch.func import functional_call

from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.extensions import InputGram, KBFGSQuantities, LayerMoments, extend
from kfqn_ext.geometry import LinearGeometry, register
from kfqn_ext.geometry.base import _REGISTRY
from tests.cases import assert_close

F64 = torch.float64
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4, dtype=F64), (6, 4)),
    "view": (lambda: nn.Linear(4, 4, dtype=F64), (6, 3, 4)),  # its output is a view of a product
    "convolution": (lambda: nn.Conv1d(2, 2, 3, padding=1, dtype=F64), (6, 2, 4)),
}
kinds = pytest.mark.parametrize("kind", LAYERS)


def layer_and_input(kind: str) -> tuple[Any, Tensor]:
    build, shape = LAYERS[kind]
    return build(), torch.randn(shape, dtype=F64)


def check(q: LayerMoments, layer: Any, multiplied: Tensor) -> None:
    """∂h̄ is the bias's gradient, as autograd says, and h̄ the mean of what the layer makes of what it multiplied."""
    assert_close(q.num_data * q.num_locations * q.dh_bar, layer.bias.grad, 1e-12)
    with torch.no_grad():
        if isinstance(layer, nn.Conv1d):
            h = F.conv1d(multiplied, layer.weight, layer.bias, padding=1).transpose(1, 2)
        else:
            h = F.linear(multiplied, layer.weight, layer.bias)
    assert_close(q.h_bar, h.flatten(0, -2).mean(0), 1e-12)


# ------------------------------------------------------------------ other people's hooks

Register = Callable[[], Any]


def before(layer: nn.Module, register: Register) -> None:
    register()
    extend(layer)


def after(layer: nn.Module, register: Register) -> None:
    extend(layer)
    register()


def twice(layer: nn.Module, register: Register) -> None:
    register()
    extend(layer)
    register()


orders = pytest.mark.parametrize("order", [before, after, twice])
prepended = pytest.mark.parametrize("prepend", [False, True], ids=["appended", "prepended"])


@kinds
@prepended
@orders
@pytest.mark.parametrize(
    "change",
    [lambda o: 10 * o, lambda o: o.flip(0), lambda o: o[:, :1], lambda o: o.mul_(3), lambda o: (o, 1)],
    ids=["scaled", "permuted", "cut", "in place", "tuple"],
)
def test_a_hook_that_changes_the_output(kind: str, prepend: bool, order: Any, change: Any) -> None:
    layer, x = layer_and_input(kind)

    def hook(module: Any, args: Any, out: Any) -> Any:
        return change(out) if isinstance(out, Tensor) else out

    order(layer, lambda: layer.register_forward_hook(hook, prepend=prepend))
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).sin().sum().backward()
    check(moments[layer], layer, x)


@prepended
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which the compiler looks at
def test_and_where_the_layer_is_compiled(prepend: bool) -> None:
    layer, x = layer_and_input("linear")
    extend(layer).register_forward_hook(lambda module, args, out: 10 * out, prepend=prepend)
    compiled = torch.compile(nn.Sequential(layer, nn.Tanh()), backend="eager")
    for _ in range(2):
        moments = KBFGSQuantities("sum")
        layer.zero_grad()
        with backpack(moments):
            compiled(x).sum().backward()
        check(moments[layer], layer, x)


@kinds
@prepended
@orders
def test_a_hook_that_changes_the_input(kind: str, prepend: bool, order: Any) -> None:
    layer, x = layer_and_input(kind)
    multiplied = []
    order(layer, lambda: layer.register_forward_pre_hook(lambda module, args: (args[0].exp(),), prepend=prepend))
    layer.register_forward_pre_hook(lambda module, args: multiplied.append(args[0]))
    moments, gram = KBFGSQuantities("sum"), InputGram()
    with backpack(moments, gram):
        layer(x).sin().sum().backward()
    check(moments[layer], layer, multiplied[0])
    s = torch.randn_like(moments[layer].a_bar)
    assert_close(gram[layer].A @ s, moments[layer].A @ s, 1e-12)
    assert not torch.equal(multiplied[0], x)


@kinds
@pytest.mark.parametrize("how", ["hook on the output", "hook on a later view", "full backward pre-hook"])
def test_a_hook_that_changes_the_gradient(kind: str, how: str) -> None:
    """As gradients of activations are clipped: the weight's gradient is of the changed one."""
    layer, x = layer_and_input(kind)
    extend(layer)
    if how == "full backward pre-hook":
        layer.register_full_backward_pre_hook(lambda module, g: (g[0].clamp(-0.1, 0.1),))
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        h = layer(x)
        if how == "hook on the output":
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        elif how == "hook on a later view":
            h = h.flatten()
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        h.sin().sum().backward()
    check(moments[layer], layer, x)


@kinds
def test_a_global_hook_is_named(kind: str) -> None:
    """It runs before all hooks of the module: nobody can say what the layer's own output was."""
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        layer(x).sin().sum().backward()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: 10 * out)
    try:
        with backpack(moments):
            layer(x).sin().sum().backward()
    finally:
        handle.remove()
    with pytest.raises(MissingQuantitiesError, match=r"(?s)(Linear|Conv1d)\(.*a global forward hook .* on the modules"):
        moments[layer]
    layer.zero_grad()
    with backpack(moments):
        layer(x).sin().sum().backward()
    check(moments[layer], layer, x)


class Doubled(torch.autograd.Function):
    """h = W x with a backward pass of its own, and another output beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return 2 * x, x @ weight.T

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * g[0] + g[1] @ weight, g[1].T @ x


class OwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)[1]


@pytest.fixture
def own_layer() -> Iterator[nn.Module]:
    register(OwnLayer, lambda m: LinearGeometry(d_in=4, d_out=3, groups=1, has_bias=False))
    yield extend(OwnLayer())
    _REGISTRY.pop(OwnLayer)


def test_an_output_that_is_one_of_several(own_layer: Any) -> None:
    x, moments = torch.randn(6, 4, dtype=F64), KBFGSQuantities("sum")
    with backpack(moments):
        h = own_layer(x)
        h.retain_grad()
        h.sin().sum().backward()
    assert_close(moments[own_layer].dh_bar, h.grad.mean(0), 1e-12)


# ------------------------------------------------------------------ other weights


def noisy(layer: nn.Module) -> dict[str, Tensor]:
    """Weight noise: a gradient by these is one by the layer's own, but not of the form that the layer's has."""
    return {name: p * (1 + torch.rand_like(p)) for name, p in layer.named_parameters()}


def another_weight(layer: nn.Module) -> dict[str, Tensor]:
    return {"weight": 2 * layer.weight}


def another_bias(layer: nn.Module) -> dict[str, Tensor]:
    return {"bias": 2 * layer.bias}


OTHERS = [noisy, another_weight, another_bias]


@kinds
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_call_with_other_weights_gives_no_result(kind: str, others: Any, accumulate: bool) -> None:
    """Nor does an older result stay, and BackPACK's own extensions write nothing on a weight that was not used."""
    layer, x = layer_and_input(kind)
    extend(layer)
    moments, rows = KBFGSQuantities("sum", accumulate=accumulate), BatchGrad()
    with backpack(moments):
        layer(x).sin().sum().backward()
    with backpack(moments, rows):
        functional_call(layer, others(layer), (x,)).sin().sum().backward()
    assert not hasattr(layer.weight, "grad_batch") and not hasattr(layer.weight, "kbfgs")
    with pytest.raises(MissingQuantitiesError, match=r"another (weight|bias) than it has, as by torch.func.functional"):
        moments[layer]
    moments.clear()
    layer.zero_grad()
    with backpack(moments):
        layer(x).sin().sum().backward()
    check(moments[layer], layer, x)


@kinds
@pytest.mark.parametrize("first", ["own", "noisy"])
def test_beside_a_call_with_the_layer_s_own_weights_neither(kind: str, first: str) -> None:
    """The gradient of the pass is of both."""
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    calls = [lambda: layer(x), lambda: functional_call(layer, noisy(layer), (x,))]
    with backpack(moments):
        sum(call().sin().sum() for call in (calls if first == "own" else calls[::-1])).backward()
    assert layer not in moments


@kinds
def test_the_layer_s_own_parameters_are_no_others(kind: str) -> None:
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        functional_call(layer, dict(layer.named_parameters()), (x,)).sin().sum().backward()
    check(moments[layer], layer, x)


@kinds
def test_a_teacher_is_no_part_of_the_layer_s_gradient(kind: str) -> None:
    """Its weights are held fixed; the gradient that goes through it to the input is nothing to the layer."""
    layer, x = layer_and_input(kind)
    extend(layer)
    fixed = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        x.requires_grad_()
        (functional_call(layer, fixed, (x,)).cos().sum() + layer(x).sin().sum()).backward()
    check(moments[layer], layer, x)
    assert moments[layer].num_data == len(x)


@kinds
def test_a_pass_of_another_s_parameters_is_none_of_the_layer_s(kind: str) -> None:
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    others = {name: nn.Parameter(2 * p.detach()) for name, p in layer.named_parameters()}
    with backpack(moments):
        functional_call(layer, others, (x,)).sin().sum().backward()
    with pytest.raises(MissingQuantitiesError, match="weights of another's"):
        moments[layer]


@kinds
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_that_are_replaced_between_forward_and_backward_pass(kind: str, name: str) -> None:
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        loss = layer(x).sin().sum()
        setattr(layer, name, nn.Parameter(2 * getattr(layer, name).detach()))
        loss.backward()
    assert layer not in moments


@pytest.mark.parametrize("kind", ["linear", "view"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_change_between_forward_and_backward_pass(kind: str, name: str) -> None:
    """Of a layer whose input needs no gradient; of others autograd says so itself, where it is the weight."""
    layer, x = layer_and_input(kind)
    extend(layer)
    moments = KBFGSQuantities("sum")
    with backpack(moments):
        loss = layer(x).sin().sum()
        with torch.no_grad():
            getattr(layer, name).mul_(2)
        loss.backward()
    with pytest.raises(MissingQuantitiesError, match=f"its {name} was changed in place between"):
        moments[layer]


def test_a_named_layer_that_is_frozen_says_so_too() -> None:
    layer, x = layer_and_input("linear")
    extend(layer.requires_grad_(False))
    moments = KBFGSQuantities("sum", modules=[layer])
    with backpack(moments):
        functional_call(layer, noisy(layer), (x.requires_grad_(),)).sin().sum().backward()
    with pytest.raises(MissingQuantitiesError, match="called with another weight"):
        moments[layer]


def test_nothing_is_said_of_the_input_of_a_call_that_is_passed_over() -> None:
    """It was modified in place, by which a layer that is measured would be an error."""
    layer, x = layer_and_input("linear")
    extend(layer)
    others, moments = {"bias": 2 * layer.bias}, KBFGSQuantities()
    fixed = {"weight": layer.weight.detach()}  # so that autograd keeps no input itself
    with backpack(moments):
        loss = functional_call(layer, {**others, **fixed}, (x,)).sin().sum()
        x.mul_(2)
        (loss + 0 * layer.weight.sum()).backward()
    assert layer not in moments


def test_a_step_between_two_backward_passes_changes_the_weights_of_the_second() -> None:
    """One graph, kept; the second pass through it is of weights that are gone."""
    layer, x = layer_and_input("linear")
    extend(layer)
    moments, optimizer = KBFGSQuantities("sum"), torch.optim.SGD(layer.parameters(), 0.1)
    loss = layer(x).sin().sum()
    for there in (True, False):
        with backpack(moments):
            loss.backward(retain_graph=True)
        assert (layer in moments) is there
        optimizer.step()


def test_settings_that_change_between_the_calls_of_a_layer() -> None:
    """As where convolutions of several dilations share their weights."""
    layer, x = extend(nn.Conv1d(2, 2, 3, padding=1, dtype=F64)), torch.randn(6, 2, 8, dtype=F64)
    moments = KBFGSQuantities("sum")
    for dilations, there in (((1, 2), False), ((2,), True), ((2, 2), True), ((1,), True)):
        h = x
        with backpack(moments):
            for d in dilations:
                layer.dilation, layer.padding = (d,), (d,)
                h = layer(h).tanh()
            h.sum().backward()
        assert (layer in moments) is there
    layer.dilation, layer.padding = (2,), (2,)
    with backpack(moments):
        loss = layer(x).sin().sum()
        layer.dilation, layer.padding = (1,), (1,)
        loss.backward()
    with pytest.raises(MissingQuantitiesError, match=r"Conv1d\(.*its settings \(stride, padding, …\) were changed"):
        moments[layer]


@kinds
def test_settings_that_say_nothing_about_the_layer_may_change(kind: str) -> None:
    layer, x = layer_and_input(kind)
    extend(layer)
    moments, layer.count = KBFGSQuantities("sum"), 0
    with backpack(moments):
        loss = layer(x).sin().sum()
        layer.eval()
        layer.count += 1
        loss.backward()
    check(moments[layer], layer, x)


def test_no_copy_of_a_weight_is_held() -> None:
    layer, x = layer_and_input("linear")
    extend(layer)
    others = noisy(layer)
    gone = others["weight"].untyped_storage()._weak_ref()
    out = functional_call(layer, others, (x,))
    del others
    assert torch.UntypedStorage._expired(gone)
    torch.UntypedStorage._free_weak_ref(gone)
    assert out.requires_grad
