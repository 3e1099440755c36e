"""An input lives no longer for being extended than it does without: autograd keeps it, or what took its place."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import KBFGSQuantities, extend
from tests.cases import assert_close

DEPTH = 4


def body() -> Any:
    """Without activations, which would keep a layer's input as their own output."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(DEPTH)))


def plainly(model: Any, x: Tensor) -> Tensor:
    return model(x)


def checkpointed(model: Any, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def offloaded(model: Any, x: Tensor) -> Tensor:
    """As save_on_cpu does: what autograd saves is taken elsewhere, here into bytes."""

    def pack(t: Tensor) -> tuple[Any, torch.dtype]:
        return t.detach().numpy().tobytes(), t.shape

    def unpack(packed: tuple[Any, Any]) -> Tensor:
        return torch.frombuffer(bytearray(packed[0]), dtype=torch.float32).reshape(packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return model(x)


def frozen(model: Any, x: Tensor) -> Tensor:
    """Below a part that is trained, as in fine-tuning."""
    model.requires_grad_(False)
    return model(x.requires_grad_())


def inputs_alive(run: Callable[[Any, Tensor], Tensor], extended: bool) -> int:
    """How many of the layers' inputs are alive when the forward pass has ended."""
    model, inputs = body(), []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args: inputs.append(args[0].untyped_storage()._weak_ref()))
    if extended:
        extend(model)
    output = run(model, torch.randn(50, 6))
    alive = sum(not torch.UntypedStorage._expired(seen) for seen in inputs)
    for seen in inputs:
        torch.UntypedStorage._free_weak_ref(seen)
    assert output.requires_grad
    return alive


@pytest.mark.parametrize("run", [plainly, checkpointed, offloaded, frozen])
def test_after_the_forward_pass(run: Callable[[Any, Tensor], Tensor]) -> None:
    alive = {extended: inputs_alive(run, extended) for extended in (False, True)}
    assert alive[True] == alive[False]
    assert (alive[True] == 2 * DEPTH) == (run is plainly)


@pytest.mark.parametrize("run", [checkpointed, offloaded, frozen])
def test_and_is_measured_all_the_same(run: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = extend(body()), torch.randn(50, 6)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    want, got = KBFGSQuantities(modules=layers), KBFGSQuantities(modules=layers)
    for how, moments in ((plainly, want), (run, got)):
        with backpack(moments):
            how(model, x.clone()).square().sum().backward()
    for layer in layers:
        for name in ("a_bar", "h_bar", "dh_bar"):
            assert_close(getattr(got[layer], name), getattr(want[layer], name), 1e-6)
        assert got[layer].num_data == 50


def test_a_frozen_layer_that_is_named_wants_its_forward_pass_in_the_context() -> None:
    layer, x = extend(nn.Linear(3, 2).requires_grad_(False)), torch.rand(4, 3, requires_grad=True)
    for inside in (False, True):
        moments = KBFGSQuantities(modules=[layer])
        with backpack(moments) if inside else nullcontext():
            loss = layer(x).sum()
        with backpack(moments):
            loss.backward()
        assert (layer in moments) == inside
