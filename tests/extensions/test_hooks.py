"""``extend``: hooks that survive real networks, run any first-order BackPACK extension, and leave nothing behind."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import backpack as stock
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from backpack import extensions as bp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import InputGram, KBFGSQuantities, extend, input_gradients_only, unextend
from kfqn_ext.extensions.kbfgs import LayerMoments
from tests.cases import assert_close

F64 = torch.float64


class Net(nn.Module):
    """Everything that breaks full backward hooks; ``inplace=False`` computes the same in the ordinary way."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.relu = nn.ReLU(inplace)
        self.tokens = nn.Linear(25, 6)  # on [N, 4, 25]: its output is a view
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        y = self.conv2(x)
        if self.inplace:
            y += x
        else:
            y = y + x
        y = self.tokens(self.relu(y).flatten(2))
        y = y.mul_(2).relu_() if self.inplace else (y * 2).relu()
        z = self.head(y.flatten(1))
        if self.inplace:
            z[:, 0] *= 3
            return z
        return z * torch.tensor([3.0, 1.0, 1.0])


def pair() -> tuple[Any, Any, Tensor, Tensor]:
    """An in-place network and its out-of-place twin, with data."""
    inplace = Net(True).double()
    twin = Net(False).double()
    twin.load_state_dict(inplace.state_dict())
    return inplace, twin, torch.randn(6, 2, 5, 5, dtype=F64), torch.arange(6) % 3


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]


def same(got: LayerMoments, want: LayerMoments, tol: float = 0.0) -> None:
    assert (got.num_data, got.num_locations) == (want.num_data, want.num_locations)
    s = torch.ones_like(want.a_bar)
    for one, other in ((got.a_bar, want.a_bar), (got.h_bar, want.h_bar), (got.dh_bar, want.dh_bar)):
        assert_close(one, other, tol)
    assert_close(got.A @ s, want.A @ s, tol)


def test_in_place_network_equals_its_out_of_place_twin() -> None:
    inplace, twin, x, y = pair()
    found = []
    for model in (inplace, twin):
        extend(model)
        moments = KBFGSQuantities()
        with backpack(moments):
            F.cross_entropy(model(x), y).backward()
        found.append([moments[m] for _, m in layers(model)])
    for got, want in zip(*found, strict=True):
        same(got, want, 1e-14)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5), (2, 2, 2, 5)])
@pytest.mark.parametrize("change", [Tensor.relu_, lambda h: h.mul_(3), lambda h: h[..., :1].mul_(3)])
def test_output_changed_in_place(shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> None:
    """Also where the output is a view: a hook on a view that is modified in place never fires."""
    layer, x, moments = extend(nn.Linear(5, 4, dtype=F64)), torch.randn(shape, dtype=F64), KBFGSQuantities()
    with backpack(moments):
        h = layer(x)
        change(h)
        h.square().sum().backward()
    assert_close(layer.bias.grad, moments[layer].dh_bar * moments[layer].num_locations, 1e-14)


def test_unbatched_convolution_changed_in_place() -> None:
    layer, moments = extend(nn.Conv2d(2, 3, 3, dtype=F64)), KBFGSQuantities()
    with backpack(moments):
        layer(torch.randn(2, 6, 6, dtype=F64)).relu_().square().sum().backward()
    assert_close(layer.bias.grad, moments[layer].dh_bar * 16, 1e-14)


@pytest.mark.parametrize("ext", [bp.BatchGrad, bp.SumGradSquared])
def test_backpacks_own_extensions_on_an_in_place_network(ext: Any) -> None:
    model, twin, x, y = pair()
    extend(model)
    extension = ext()
    with backpack(extension):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    for name, p in model.named_parameters():
        single = []
        for n in range(len(x)):
            loss = F.cross_entropy(twin(x[n : n + 1]), y[n : n + 1])
            single.append(torch.autograd.grad(loss, twin.get_parameter(name))[0])
        g = torch.stack(single)
        want = {"grad_batch": g, "sum_grad_squared": g.square().sum(0)}
        assert_close(getattr(p, extension.savefield), want[extension.savefield], 1e-12)


@pytest.mark.parametrize("ext", [bp.KFAC, bp.DiagGGNExact, bp.DiagHessian])
def test_second_order_extension_is_refused_by_name(ext: Any) -> None:
    model: Any = extend(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)))
    with pytest.raises(NotImplementedError, match=f"{ext.__name__}.*second-order.*backpack.extend"), backpack(ext()):
        F.cross_entropy(model(torch.rand(5, 4)), torch.arange(5) % 3).backward()
    assert not any(hasattr(m, name) for m in model.modules() for name in ("input0", "output"))
    with backpack(KBFGSQuantities()):  # and the model works as before
        F.cross_entropy(model(torch.rand(5, 4)), torch.arange(5) % 3).backward()
    assert model[0].weight.kbfgs.num_data == 5


def test_extension_hook_runs_after_the_extensions() -> None:
    model, seen = extend(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))), []
    with backpack(KBFGSQuantities(), extension_hook=lambda m: seen.append((m, m.weight.kbfgs.num_data))):
        model(torch.rand(5, 4)).sum().backward()
    assert seen == [(model[1], 5), (model[0], 5)]


def test_extend_is_idempotent_and_returns_the_model() -> None:
    model = Net(True)
    assert extend(model) is model and extend(extend(model)) is model
    assert [len(m._forward_hooks) for _, m in layers(model)] == [1] * 4
    model.extra = nn.Linear(3, 3)
    extend(model)  # attaches what is new
    assert len(model.extra._forward_hooks) == 1 and len(model.head._forward_hooks) == 1


def test_extending_both_ways_measures_once() -> None:
    for first, second in ((extend, stock.extend), (stock.extend, extend)):
        layer = second(first(nn.Linear(4, 3)))
        calls: list[int] = []
        with backpack(KBFGSQuantities(), extension_hook=lambda m, calls=calls: calls.append(1)):
            layer(torch.rand(5, 4)).sum().backward()
        assert calls == [1] and layer.weight.kbfgs.num_data == 5


def test_unextend_leaves_nothing() -> None:
    model = Net(True)
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    theirs = model.head.register_forward_hook(lambda *_: None)  # somebody else's stays
    assert unextend(extend(model)) is model
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert [len(m._forward_hooks) for _, m in layers(model)] == [0, 0, 0, 1]
    assert not any(m._forward_hooks_with_kwargs or m._backward_hooks or m._forward_pre_hooks for m in model.modules())
    theirs.remove()
    moments = KBFGSQuantities()
    with backpack(moments):
        model(torch.rand(2, 2, 5, 5)).sum().backward()
    assert not any(m in moments for _, m in layers(model))
    unextend(model)  # again: nothing to do
    with backpack(moments):
        extend(model)(torch.rand(2, 2, 5, 5)).sum().backward()
    assert all(m in moments for _, m in layers(model))


def test_extending_changes_nothing_that_the_model_computes() -> None:
    plain, x, y = Net(True), torch.randn(4, 2, 5, 5), torch.arange(4) % 3
    model = extend(copy.deepcopy(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    with backpack(KBFGSQuantities(), InputGram()):
        F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("trip", ["deepcopy", "pickle"])
def test_a_copy_of_an_extended_model_works(trip: str) -> None:
    model, x = extend(Net(True)), torch.randn(4, 2, 5, 5)
    with backpack(KBFGSQuantities()):
        model(x).sum().backward()  # results on the weights must not hinder the copy
    if trip == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    of_model, of_twin = KBFGSQuantities(), KBFGSQuantities()
    with backpack(of_twin):
        twin(x).sum().backward()
    with backpack(of_model):
        model(x).sum().backward()
    for (_, a), (_, b) in zip(layers(model), layers(twin), strict=True):
        assert a not in of_twin and b not in of_model
        same(of_twin[b], of_model[a])
    extend(twin)
    assert [len(m._forward_hooks) for _, m in layers(twin)] == [1] * 4
    unextend(twin)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for _, m in layers(twin)] == [0] * 4
    assert [len(m._forward_hooks) for _, m in layers(model)] == [1] * 4


def test_hooks_that_somebody_clears() -> None:
    """Without a word: the layer is not extended any more."""
    layer, moments = extend(nn.Linear(4, 3)), KBFGSQuantities()
    layer._forward_hooks.clear()
    with backpack(moments):
        layer(torch.rand(5, 4)).sum().backward()
    assert layer not in moments


def test_hooks_leave_no_attributes_even_when_an_extension_raises() -> None:
    class Broken(KBFGSQuantities):
        def measure(self, module: nn.Module, layer: Any) -> LayerMoments:
            raise ZeroDivisionError

    layer = extend(nn.Linear(4, 3))
    before = set(vars(layer))
    with pytest.raises(ZeroDivisionError), backpack(Broken()):
        layer(torch.rand(5, 4)).sum().backward()
    assert set(vars(layer)) == before


def test_input_by_keyword() -> None:
    layer, moments = extend(nn.Linear(4, 3)), KBFGSQuantities()
    with backpack(moments):
        layer(input=torch.rand(5, 4)).sum().backward()
    assert moments[layer].num_data == 5


def test_each_backward_pass_sees_its_own_input() -> None:
    """Forward, forward, an evaluation with gradients enabled, then the backward passes: never another call's input."""
    layer, (x1, x2) = extend(nn.Linear(4, 3, dtype=F64)), torch.randn(2, 5, 4, dtype=F64)
    losses = [layer(x).square().mean() for x in (x1, x2)]
    layer(torch.randn(7, 4, dtype=F64))
    for x, loss in zip((x1, x2), losses, strict=True):
        moments = KBFGSQuantities()
        with backpack(moments):
            loss.backward()
        assert torch.equal(moments[layer].a_bar[:-1], x.mean(0)) and moments[layer].num_data == 5


def test_no_gradient_no_trace() -> None:
    layer = extend(nn.Linear(4, 3))
    x = torch.rand(5, 4)
    gone = weakref.ref(x)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    with torch.inference_mode():
        layer(x)
    output = layer(x)  # watched, but never differentiated
    del x
    assert gone() is not None  # the graph keeps the input …
    del output
    gc.collect()
    assert gone() is None  # … and nothing else does


@pytest.mark.parametrize("probe", [None, lambda module, a_bar: a_bar, lambda module, a_bar: None])
def test_a_probe_lets_the_input_go(probe: Any) -> None:
    layer, moments = extend(nn.Linear(4, 3)), KBFGSQuantities(probe=probe)
    memory = np.ones((5, 4), dtype=np.float32)
    gone, x = weakref.ref(memory), torch.from_numpy(memory)
    del memory  # x has the only reference to its memory
    with backpack(moments):
        layer(x).sum().backward()
    del x
    assert (gone() is None) is (probe is not None)  # at once: no cycle waits for the garbage collector
    moments.clear()
    assert gone() is None


def test_a_result_keeps_no_module_alive() -> None:
    layer: Any = extend(nn.Linear(4, 3))
    moments = KBFGSQuantities()
    with backpack(moments):
        layer(torch.rand(5, 4)).sum().backward()
    q, gone = moments[layer], weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None and q.num_data == 5 and len(moments._results) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    a, b = extend(nn.Linear(4, 4, dtype=F64)), extend(nn.Linear(4, 4, dtype=F64))
    x, moments, plain = torch.randn(5, 4, dtype=F64, requires_grad=True), KBFGSQuantities(), KBFGSQuantities()
    with backpack(plain):
        b(a(x).tanh()).square().mean().backward()
    with backpack(moments):
        b(checkpoint(lambda v: a(v).tanh(), x, use_reentrant=reentrant)).square().mean().backward()
    for layer in (a, b):
        same(moments[layer], plain[layer])


# ------------------------------------------------------------------ input_gradients_only


def test_input_gradients_only_gives_the_quantities_and_no_gradient() -> None:
    model, _, x, y = pair()
    extend(model)
    model.conv2.bias.requires_grad_(False)
    wanted = [m for _, m in layers(model)]
    ordinary, alone = KBFGSQuantities(modules=wanted), KBFGSQuantities(modules=wanted)
    with backpack(ordinary):
        F.cross_entropy(model(x), y).backward()
    model.head.weight.grad = None
    grads = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    with input_gradients_only(model), backpack(alone):
        assert not any(p.requires_grad for p in model.parameters())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    for name, p in model.named_parameters():
        before, value = grads[name]
        assert p.grad is before and (before is None or torch.equal(before, value))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
    for module in wanted:
        same(alone[module], ordinary[module])


def test_input_gradients_only_ends_with_an_error_too_and_can_be_nested() -> None:
    model = extend(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(KeyError), input_gradients_only(model):
        with input_gradients_only(model):
            pass
        assert not model[0].weight.requires_grad
        raise KeyError
    assert model[0].weight.requires_grad and model[0].bias.requires_grad
    assert not model[0].requires_grad_(False)(torch.rand(2, 4)).requires_grad  # outside, no zero is added


# ------------------------------------------------------------------ models that BackPACK has extended


def test_unextend_takes_backpacks_hooks_off_too() -> None:
    """Then operations in place run again, and our hooks serve the layers; somebody's own hooks stay."""
    inplace, twin, x, y = pair()
    calls: list[str] = []
    inplace.head.register_forward_hook(lambda *_: calls.append("own"))
    stock.extend(inplace)
    with pytest.raises(RuntimeError, match="modified inplace|modified in-place|view"):
        F.cross_entropy(inplace(x), y)
    assert unextend(inplace) is inplace
    found = []
    for model in (inplace, twin):
        moments = KBFGSQuantities()
        with backpack(moments):
            F.cross_entropy(extend(model)(x), y).backward()
        found.append([moments[m] for _, m in layers(model)])
    for got, want in zip(*found, strict=True):
        same(got, want, 1e-14)
    assert calls == ["own"]
    assert not any("_backpack_extend" in m.__dict__ or "input0" in m.__dict__ for m in inplace.modules())
