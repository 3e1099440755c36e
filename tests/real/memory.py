"""What is held and for how long: nothing that is not needed, after anything that can happen."""

import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from backpack.context import CTX
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities, extend
from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, firsts

SETTINGS: dict[str, Any] = {"lr": 0.05, "damping": 1.0, "curvature_update_freq": 1}


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(True), nn.Linear(5, 3))


def batch(size: int = 4) -> tuple[Tensor, Any]:
    """An input, and a weak reference to its memory."""
    memory = np.random.default_rng(0).standard_normal((size, 6)).astype(np.float32)
    return torch.from_numpy(memory), weakref.ref(memory)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def freed(run: Callable[[Any, Tensor], Any]) -> None:
    """After ``run`` has ended, nothing holds the input."""
    model = extend(net())
    x, memory = batch()
    kept = run(model, x)
    del x, kept
    gc.collect()
    assert memory() is None
    assert not any(hasattr(m, name) for m in model.modules() for name in ("input0", "output"))


def forward_without_backward() -> None:
    freed(lambda model, x: model(x))
    freed(lambda model, x: F.cross_entropy(model(x), torch.arange(4) % 3))


def without_gradients() -> None:
    def no_grad(model: Any, x: Tensor) -> None:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)

    freed(no_grad)
    model, kept = extend(net()), []
    with torch.no_grad():
        kept.append(model(torch.randn(4, 6)))
    assert not kept[0].requires_grad and kept[0]._backward_hooks is None


def after_a_backward_pass() -> None:
    def run(model: Any, x: Tensor) -> None:
        moments = KBFGSQuantities(probe=lambda module, a: a)
        with backpack(moments):
            model(x).sum().backward()

    freed(run)


def during_a_backward_pass() -> None:
    """An input is let go when autograd lets it go, not when the whole graph is dropped."""
    model = extend(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    x, held = batch()
    loss = model(x).sum()
    del x
    loss.backward()
    gc.collect()
    assert held() is None and loss.grad_fn is not None  # the graph's nodes are still there


def stopped_at_an_output() -> None:
    """A pass that ends at a layer's output is none through the layer; the next one measures it."""
    for retain in (True, False):
        layer, moments = extend(nn.Linear(6, 3)), KBFGSQuantities()
        y = layer(torch.randn(4, 6))
        (g,) = torch.autograd.grad(y.square().sum(), y, retain_graph=retain)
        with backpack(moments):
            y.backward(g)
        torch.testing.assert_close(moments[layer].dh_bar, g.sum(0))


def gone_with_the_graph() -> None:
    """Of a frozen layer, through which autograd itself could go again: the next pass says so, or works when kept."""
    for retain in (True, False):
        layer = extend(nn.Linear(6, 3)).requires_grad_(False)
        moments = KBFGSQuantities(modules=[layer])
        with backpack(moments):
            y = layer(torch.randn(4, 6, requires_grad=True))
            y.backward(torch.ones_like(y), retain_graph=retain)
            if retain:
                y.backward(torch.ones_like(y))
                assert layer in moments
            else:
                with pytest.raises(RuntimeError, match="is gone.*retain_graph=True"):
                    y.backward(torch.ones_like(y))


def exception_in_an_extension() -> None:
    class Broken(KBFGSQuantities):
        def measure(self, module: nn.Module, layer: Any) -> Any:
            raise ZeroDivisionError("in the hook")

    def run(model: Any, x: Tensor) -> None:
        with pytest.raises(ZeroDivisionError), backpack(Broken()):
            model(x).sum().backward()
        assert CTX.get_active_exts() == ()

    freed(run)


def exception_in_a_closure() -> None:
    """In the first pass or the second: parameters, state, buffers, gradients' owners and hooks as before."""
    for when in (1, 2):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer, calls = KBFGS(model, **SETTINGS), []
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(4, 6), torch.arange(4) % 3))
        x, memory = batch()

        def closure(x: Tensor, model: Any = model, calls: Any = calls, when: int = when) -> Tensor:
            calls.append(1)
            model.zero_grad()
            loss = F.cross_entropy(model(x), torch.arange(4) % 3)
            if len(calls) == when:
                raise KeyError("no such thing")
            loss.backward()
            return loss

        before = {p: p.detach().clone() for p in model.parameters()}
        steps = optimizer.param_groups[0]["step"]
        with pytest.raises(KeyError):
            optimizer.step(lambda x=x: closure(x))
        assert CTX.get_active_exts() == () and all(p.requires_grad for p in model.parameters())
        if when == 1:
            assert all(torch.equal(p, value) for p, value in before.items())
            assert optimizer.param_groups[0]["step"] == steps
        del x
        gc.collect()
        assert memory() is None
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(4, 6), torch.arange(4) % 3))
        assert all(p.isfinite().all() for p in model.parameters())


def between_steps() -> None:
    """After a step nothing of the minibatch is alive, also with inputs kept for micro-batches."""
    for keep in (False, True):
        model = net()
        optimizer = KBFGS(model, **SETTINGS)
        for _ in range(2):
            x, memory = batch()
            optimizer.zero_grad()
            with optimizer.first_pass(keep_inputs=keep):
                F.cross_entropy(model(x), torch.arange(4) % 3).backward()
            optimizer.step()
            with optimizer.second_pass():
                F.cross_entropy(model(x), torch.arange(4) % 3).backward()
            del x
            gc.collect()
            assert memory() is None and not any(hasattr(p, "kbfgs") for p in model.parameters())


def a_thousand_models() -> None:
    """Made, extended, measured and dropped: no hook, no module and no result stays anywhere."""
    handles, before, gone = len(CTX.hook_handles), live_tensors(), []
    for i in range(1000):
        model = extend(net())
        if i % 10 == 0:
            with backpack(KBFGSQuantities()):
                model(torch.ones(2, 6)).sum().backward()
        gone.append(weakref.ref(model[0]))
    del model
    assert live_tensors() == before and len(CTX.hook_handles) == handles
    assert not any(ref() is not None for ref in gone)


def two_hundred_steps() -> None:
    """Constant memory: not a tensor more after step 10, and no growth of the process."""
    for name in firsts(lambda member: member.samples):
        model = net()
        optimizer = FAMILY[name].make(model, lr=0.05)
        x, y, counts, sizes = torch.randn(16, 6), torch.arange(16) % 3, [], []
        for step in range(200):
            optimizer.step(Minibatch(model, F.cross_entropy, x, y))
            if step in (20, 199):
                counts.append(live_tensors())
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert counts[0] == counts[1]
        assert sizes[1] - sizes[0] < 20_000  # KiB


def deleted_optimizer() -> None:
    """Deleting optimizer and model frees both; deleting the optimizer alone frees its state."""
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(4, 6), torch.arange(4) % 3))
    refs = [weakref.ref(model[0]), weakref.ref(optimizer), weakref.ref(optimizer.state[model[0].weight]["H_A"])]
    del optimizer
    gc.collect()
    assert [r() is None for r in refs] == [False, True, True]
    del model
    gc.collect()
    assert refs[0]() is None


def no_copy_of_the_gradients() -> None:
    """first_pass holds no reference to the gradients of the step before."""
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(4, 6), torch.arange(4) % 3))
    old = weakref.ref(model[0].weight.grad)
    optimizer.zero_grad()
    with optimizer.first_pass():
        F.cross_entropy(model(torch.randn(4, 6)), torch.arange(4) % 3).backward()
        gc.collect()
        assert old() is None
