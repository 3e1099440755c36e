"""A weight that is multiplied outside of its layer too is noticed, and a penalty on it is none of these."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext._torch import roots_of_backward
from kfqn_ext.extensions import extend
from kfqn_ext.extensions.elsewhere import multiplied_elsewhere
from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
Loss = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Its layers are called once each, in all ways that make another graph: with and without bias, by location."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.conv = nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular")
        self.by_location = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.by_location(self.conv(self.a(x).tanh().unsqueeze(1)).mT).sum(-1)
        return self.c(self.b(h).relu_())


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def plain(m: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(m(x), Y)


def before(first: Loss) -> Loss:
    """A loss of a network with something before it."""
    return lambda m, x: plain(m, first(m, x))


def tied(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) + (F.linear(m.a(x).tanh(), m.a.weight.T) - x).square().mean()


USES: dict[str, tuple[Loss, set[str]]] = {
    "F.linear": (before(lambda m, x: F.linear(x, m.b.weight)), {"b"}),
    "F.linear with its bias": (before(lambda m, x: F.linear(x, m.a.weight, m.a.bias)), {"a"}),
    "F.linear by location": (before(lambda m, x: F.linear(x.unsqueeze(1), m.b.weight).flatten(1)), {"b"}),
    "behind the layer": (lambda m, x: F.cross_entropy(F.linear(m(x), m.c.weight.T)[:, :3], Y), {"c"}),
    "directly before the layer": (before(lambda m, x: m.b(F.linear(x, m.b.weight))), {"b"}),
    "matmul": (before(lambda m, x: x @ m.b.weight.T), {"b"}),
    "einsum": (before(lambda m, x: torch.einsum("ni,oi->no", x, m.b.weight)), {"b"}),
    "bmm": (before(lambda m, x: torch.bmm(x.unsqueeze(1), m.b.weight.expand(len(x), 5, 5)).flatten(1)), {"b"}),
    "with noise": (before(lambda m, x: F.linear(x, m.b.weight + 0.1 * torch.randn(5, 5))), {"b"}),
    "with another's": (before(lambda m, x: F.linear(x, m.b.weight + m.a.weight)), {"a", "b"}),
    "a product of two": (before(lambda m, x: x @ (m.a.weight @ m.b.weight)), {"a", "b"}),
    "convolution": (before(lambda m, x: F.conv1d(x.unsqueeze(1), m.conv.weight, padding=1).sum(1)), {"conv"}),
    "embedding": (before(lambda m, x: F.embedding(Y, m.b.weight)), {"b"}),
    "transposed, tied by hand": (tied, {"a"}),
    "on an input with a gradient": (before(lambda m, x: x.clone().requires_grad_() @ m.b.weight), {"b"}),
}
PENALTIES: dict[str, Loss] = {
    "none": lambda m, x: torch.zeros(()),
    "L2": lambda m, x: sum(p.square().sum() for p in m.parameters()),
    "L1": lambda m, x: sum(p.abs().sum() for p in m.parameters()),
    "towards a start": lambda m, x: sum((p - torch.ones_like(p)).pow(2).mean() for p in m.parameters()),
    "masked": lambda m, x: (m.b.weight * torch.eye(5)).norm(),
    "groups of weights": lambda m, x: m.b.weight.norm(dim=1).sum() + m.conv.weight.norm(dim=(1, 2)).sum(),
    "orthogonality": lambda m, x: (m.b.weight.T @ m.b.weight - torch.eye(5)).norm(),
    "orthogonality of filters": lambda m, x: F.conv1d(m.conv.weight, m.conv.weight, padding=2).square().sum(),
    "spectral norm": lambda m, x: torch.linalg.matrix_norm(m.b.weight, 2),
    "a power iteration": lambda m, x: torch.ones(5) @ (m.b.weight @ torch.ones(5)),
    "path norm": lambda m, x: (m.b.weight.abs() @ m.a.weight.abs()).sum(),
    "of activations": lambda m, x: m.a(x).square().sum(),
    "the layer again": lambda m, x: m(m.b(x)).square().sum(),
    "of gradients by the input": lambda m, x: torch.autograd.grad(
        m(x.requires_grad_()).sum(), x, create_graph=True)[0].square().sum(),
}  # fmt: skip


def found(model: nn.Module, loss: Tensor) -> set[str]:
    names = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
    return {names[p] for p in multiplied_elsewhere([loss.grad_fn])}


@pytest.fixture(params=["float32", "autocast", "checkpoint"], name="run")
def _run(request: Any) -> Iterator[Callable[[Loss, Any], Tensor]]:
    def run(loss: Loss, model: Any) -> Tensor:
        x = X.clone()
        if request.param == "checkpoint":
            return checkpoint(loss, model, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=request.param == "autocast"):
            return loss(model, x)

    yield run


@pytest.mark.parametrize("use", USES)
def test_another_product_is_found(use: str, run: Any) -> None:
    loss, names = USES[use]
    model = extend(net())
    assert found(model, run(loss, model)) == names


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_none(penalty: str, run: Any) -> None:
    model = extend(net())

    def loss(m: Any, x: Tensor) -> Tensor:
        return plain(m, x) + 0.1 * PENALTIES[penalty](m, x.clone())

    assert found(model, run(loss, model)) == set()


# ------------------------------------------------------------------ in an optimizer

BUILDS: dict[str, Callable[[Any], Any]] = {
    "KBFGS": KBFGS,
    "OnePassKBFGS": OnePassKBFGS,
    "as printed": lambda model: KBFGS.as_printed(model, lr=0.01, damping=1.0),
}


def step(build: str, model: Any, optimizer: Any, loss: Loss) -> None:
    """By a closure, and where one pass suffices in a plain loop."""
    if build == "OnePassKBFGS":
        optimizer.zero_grad()
        loss(model, X.clone()).backward()
        optimizer.step()
    else:

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model, X.clone())
            value.backward()
            return value

        optimizer.step(closure)


def with_curvature(model: Any, optimizer: Any) -> set[str]:
    return {name for name, layer in model.named_children() if "num_locations" in optimizer.state[layer.weight]}


LAYERS = {"a", "b", "c", "conv", "by_location"}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("use", ["F.linear", "convolution", "transposed, tied by hand"])
def test_such_a_layer_moves_without_a_block(build: str, use: str) -> None:
    loss, names = USES[use]
    model = net()
    optimizer = BUILDS[build](model)
    with pytest.warns(UserWarning, match=f"Layer {min(names)} has a gradient.* multiplied outside of it too"):
        step(build, model, optimizer, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(build, model, optimizer, loss)
    assert with_curvature(model, optimizer) == LAYERS - names


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("penalty", ["L2", "L1", "orthogonality", "the layer again"])
def test_penalties_leave_all_layers_their_blocks(build: str, penalty: str) -> None:
    model = net()
    optimizer = BUILDS[build](model)
    for _ in range(2):
        step(build, model, optimizer, lambda m, x: plain(m, x) + 1e-3 * PENALTIES[penalty](m, x))
    assert with_curvature(model, optimizer) == LAYERS


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    model = net()
    optimizer = OnePassKBFGS(model)

    def loss(m: Any, x: Tensor) -> Tensor:
        return checkpoint(USES["F.linear"][0], m, x.requires_grad_(), use_reentrant=reentrant)

    with pytest.warns(UserWarning, match="multiplied outside of it too"):
        step("OnePassKBFGS", model, optimizer, loss)
    assert with_curvature(model, optimizer) == LAYERS - {"b"}


def test_a_layer_that_has_curvature_keeps_it() -> None:
    """As other layers that can't be measured any more."""
    model = net()
    optimizer = OnePassKBFGS(model, curvature_update_freq=1)
    step("OnePassKBFGS", model, optimizer, plain)
    seen = optimizer.diagnostics()[1].A.kept
    with pytest.warns(UserWarning, match="multiplied outside of it too.*keeps what it has"):
        step("OnePassKBFGS", model, optimizer, USES["F.linear"][0])
    assert optimizer.diagnostics()[1].A.kept == seen
    step("OnePassKBFGS", model, optimizer, plain)
    assert optimizer.diagnostics()[1].A.kept > seen


def test_micro_batches_of_which_one_does() -> None:
    model = net()
    optimizer = OnePassKBFGS(model)
    plain(model, X).backward()
    USES["F.linear"][0](model, X).backward()
    with pytest.warns(UserWarning, match="multiplied outside of it too"):
        optimizer.step()
    assert with_curvature(model, optimizer) == LAYERS - {"b"}


# The second derivative of the last four is made of products, whose nodes have no name that tells.
ACTIVATIONS = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "sin": torch.sin,
    "square": lambda x: x + 0.1 * x.square(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_loss_of_derivatives_leaves_layers_their_blocks(activation: str) -> None:
    """As one of a differential equation has them, and one of energies and forces."""
    torch.manual_seed(0)
    bend = ACTIVATIONS[activation]
    layers = nn.ModuleList((nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1)))
    optimizer = OnePassKBFGS(layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            t = torch.linspace(0, 3, 16)[:, None].requires_grad_()
            u = layers[2](bend(layers[1](bend(layers[0](t)))))
            (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            ((slope - t.cos()).square().mean() + (u - t.sin()).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all("H_A" in optimizer.state[layer.weight] for layer in layers)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Where hooks run in a thread of torch's."""
    model = net().cuda()
    optimizer, x = OnePassKBFGS(model), X.cuda()
    with pytest.warns(UserWarning, match="multiplied outside of it too"):
        F.cross_entropy(model(F.linear(x, model.b.weight)), Y.cuda()).backward()
        optimizer.step()
    assert with_curvature(model, optimizer) == LAYERS - {"b"}


def test_where_nobody_knows_the_root_there_is_no_verdict() -> None:
    assert roots_of_backward(0) == [] and multiplied_elsewhere([]) == set()
    model = net()
    optimizer = KBFGS(model)
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    assert with_curvature(model, optimizer) == LAYERS
