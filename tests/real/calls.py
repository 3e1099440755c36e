"""What users make of a layer's calls: hooks, other weights, other products with its weight, passes aside, threads."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.func import functional_call

from kfqn_ext.extensions import KBFGSQuantities, KFACFactors, extend
from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests import reference as ref
from tests.cases import assert_close
from tests.optim import test_draws as draws
from tests.optim import test_passes_aside as aside
from tests.optim import test_threads as threads
from tests.optim.test_resume import assert_identical
from tests.real import watch

F64 = torch.float64
X, Y = torch.randn(12, 5, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def of_hooks(change: Callable[[nn.Module], Any]) -> None:
    """Each layer's ∂h̄ is its bias's gradient, and ā and A are of what it multiplied."""
    model = net()
    change(model[2])
    extend(model)
    moments, factors = KBFGSQuantities(), KFACFactors()
    inputs: dict[nn.Module, Tensor] = {}
    for layer in (model[0], model[2], model[4]):
        layer.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0].detach()}))
    with backpack(moments, factors):
        F.cross_entropy(model(X), Y).backward()
    for layer in (model[0], model[2], model[4]):
        a = ref.patches(layer, inputs[layer]).flatten(0, 1)
        assert_close(moments[layer].dh_bar, layer.bias.grad, 1e-12)
        assert_close(moments[layer].a_bar, a.mean(0), 1e-12)
        assert_close(factors[layer].Omega, a.T @ a / len(a), 1e-12)


def hooks_that_change_outputs() -> None:
    for prepend in (False, True):
        for change in (lambda out: 3 * out, lambda out: out.flip(0), lambda out: out[:, :1].expand(-1, 4)):

            def before(layer: nn.Module, change: Any = change, prepend: bool = prepend) -> None:
                layer.register_forward_hook(lambda m, args, out: change(out), prepend=prepend)
                extend(layer)

            def after(layer: nn.Module, change: Any = change, prepend: bool = prepend) -> None:
                extend(layer).register_forward_hook(lambda m, args, out: change(out), prepend=prepend)

            of_hooks(before)
            of_hooks(after)
        model = net()
        model[4].register_forward_hook(lambda m, args, out: out.unsqueeze(1).expand(-1, 7, -1), prepend=prepend)
        optimizer = KBFGS.as_printed(model)
        optimizer.warm_start([X], progress=False)
        assert all(float(optimizer.state[model[i].weight]["num_locations"]) == 1 for i in (0, 2, 4))


def hooks_that_change_inputs_or_gradients() -> None:
    of_hooks(lambda layer: extend(layer).register_forward_pre_hook(lambda m, args: (args[0].exp(),), prepend=True))

    def clip(layer: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            out.register_hook(lambda g: g.clamp(-1e-3, 1e-3))

        extend(layer).register_forward_hook(hook)

    of_hooks(clip)


def named(losses: Callable[[Any], Tensor], where: int = 2, how_many: int = 1) -> None:
    """Layers are named in a warning, learn nothing and move; the others learn."""
    for build in (KBFGS, OnePassKBFGS):
        model = net()
        optimizer = build(model, curvature_update_freq=1)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = losses(model)
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.step(closure)
        found = [str(w.message) for w in said]
        assert all("has a gradient but was not measured" in message for message in found) and len(found) == how_many
        assert any(message.startswith(f"Layer {where} ") for message in found)
        state = optimizer.state[model[where].weight]
        assert "H_A" not in state and (model[where].weight != net()[where].weight).all()
        assert how_many == 3 or optimizer.state[model[0].weight]["pairs_seen_A"][0] > 0


def functional_call_with_other_weights() -> None:
    def noisy(model: Any) -> Tensor:
        weights = {name: p * (1 + 0.1 * torch.rand_like(p)) for name, p in model[2].named_parameters()}
        h = model[1](model[0](X))
        return F.cross_entropy(model[3:](functional_call(model[2], weights, (h,))), Y)

    def adapted(model: Any) -> Tensor:
        """MAML: one step, and the loss after it. In a second pass weights are frozen, and there is none to take."""
        weights = dict(model.named_parameters())
        if all(p.requires_grad for p in weights.values()):
            grads = torch.autograd.grad(F.cross_entropy(model(X), Y), list(weights.values()), create_graph=True)
            weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        return F.cross_entropy(functional_call(model, weights, (X,)), Y)

    named(noisy)
    named(adapted, how_many=3)


def settings_that_change_between_calls() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            total = 0.0
            for d in (1, 2):
                self.conv.dilation = self.conv.padding = (d,)
                total = total + self.conv(x.unsqueeze(1))
            return self.head(total.tanh().flatten(1))

    for build in (KBFGS, OnePassKBFGS):
        model = Net().double()
        optimizer = build(model)
        with pytest.warns(UserWarning, match=r"Layer conv has .* but was not measured \(.* other weights or settings"):
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        assert "H_A" not in optimizer.state[model.conv.weight] and "H_A" in optimizer.state[model.head.weight]


def weights_changed_before_the_backward_pass() -> None:
    """Of a first layer, where autograd itself does not look."""

    def clamped(model: Any) -> Tensor:
        loss = F.cross_entropy(model(X), Y)
        with torch.no_grad():
            model[0].weight.clamp_(-10, 10)
        return loss

    for build in (KBFGS, OnePassKBFGS):
        model = net()
        optimizer = build(model)
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match="Layer 0 has a gradient but was not measured"):
            with optimizer.first_pass():
                clamped(model).backward()
            optimizer.step()
        assert "H_A" not in optimizer.state[model[0].weight] and "H_A" in optimizer.state[model[2].weight]


def global_forward_hooks() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)
    try:
        named(lambda model: F.cross_entropy(model(X), Y), how_many=3)
    finally:
        handle.remove()


def weight_used_again() -> None:
    """By F.linear: it moves without a block. The layer itself, called again, is merged."""

    class Net(nn.Module):
        def __init__(self, again: str) -> None:
            super().__init__()
            self.a, self.b, self.again = nn.Linear(5, 5), nn.Linear(5, 3), again

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            own = self.again == "layer"
            return self.b((self.a(h) if own else F.linear(h, self.a.weight, self.a.bias)).tanh())

    torch.manual_seed(0)
    assert watch.check(extend(Net("layer").double()), lambda net: F.cross_entropy(net(X), Y)) == {"a", "b"}
    for build in (KBFGS, OnePassKBFGS):
        model = Net("F.linear").double()
        optimizer = build(model)
        with pytest.warns(UserWarning, match="Layer a has a gradient .* multiplied outside of it too"):
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        assert "H_A" not in optimizer.state[model.a.weight] and "H_A" in optimizer.state[model.b.weight]


def penalties_on_weights() -> None:
    """Quantities are the layer's own, and the gradient is with the penalty."""
    found = []
    for factor in (0.0, 0.1):
        model, moments = extend(net()), KBFGSQuantities()
        with backpack(moments):
            (F.cross_entropy(model(X), Y) + factor * sum(p.square().sum() for p in model.parameters())).backward()
        found.append([(moments[m].h_bar, moments[m].dh_bar, m.weight.grad, m.weight) for m in (model[0], model[2])])
    for (h, dh, g, _), (h_too, dh_too, g_too, W) in zip(*found, strict=True):
        assert torch.equal(h, h_too) and torch.equal(dh, dh_too)
        assert_close(g_too, g + 0.2 * W.detach(), 1e-12)
    model = net()
    optimizer = KBFGS(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]


def gradients_that_are_returned() -> None:
    for name in ("KBFGS", "OnePassKBFGS"):
        assert_identical(aside.trained(name, passes=aside.returned_first), aside.trained(name))


def two_models_in_two_threads() -> None:
    threads.test_two_models_in_two_threads_train_as_alone(("KBFGS", "OnePassKBFGS"))
    draws.test_two_models_in_two_threads()
    draws.test_and_with_a_lock()
