"""Layers before a normalization that removes shifts: found in the network, and spared what would change nothing."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities, extend
from kfqn_ext.optim import KBFGS, KBFGSL, KFAC, KroneckerOptimizer, Minibatch
from kfqn_ext.optim.inverses import ScaledIdentity
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner import normalized
from kfqn_ext.optim.recipe import SecondPass
from tests.optim.family import FAMILY, Member, rows
from tests.optim.test_torchvision_models import MODELS, NarrowResNet, vgg11_bn

COMMON: dict[str, Any] = {"lr": 0.05, "damping": 1.0, "curvature_update_freq": 1}


class Branching(nn.Module):
    """The output of ``both`` is normalized and also used as it is; that of ``one`` is only normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm_both, self.norm_one = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        h = torch.tanh(h) + F.relu(self.norm_both(h))
        return self.head(F.relu(self.norm_one(self.one(h))).mean((2, 3)))


class Reused(nn.Module):
    """One layer, called twice, and normalized the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(F.relu(self.norm(self.twice(self.stem(x))))).mean((2, 3)))


def conv_net(norm: nn.Module, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *between, norm, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(5))


def batch(model: nn.Module, k: int = 0, size: int = 16) -> Minibatch:
    x = torch.randn(12, 3, size, size, generator=torch.Generator().manual_seed(k))
    return Minibatch(model, F.cross_entropy, x, torch.arange(12) % 5)


def ready(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    return model


def found(optimizer: KroneckerOptimizer) -> set[str]:
    known = optimizer._preconditioner.normalized.known
    assert known is not None
    return {name for name, module in optimizer._model.named_modules() if module in known}


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "BatchNorm": (lambda: conv_net(nn.BatchNorm2d(4)), {"0"}),
    "without running statistics": (lambda: conv_net(nn.BatchNorm2d(4, track_running_stats=False)).eval(), {"0"}),
    "InstanceNorm": (lambda: conv_net(nn.InstanceNorm2d(4)), {"0"}),
    "LayerNorm removes a common shift only": (lambda: conv_net(nn.LayerNorm([4, 14, 14])), set()),
    "GroupNorm": (lambda: conv_net(nn.GroupNorm(2, 4)), set()),
    "a nonlinearity between": (lambda: conv_net(nn.BatchNorm2d(4), nn.Sigmoid()), set()),
    "one in place": (lambda: conv_net(nn.BatchNorm2d(4), nn.ReLU(inplace=True)), set()),
    "BatchNorm in eval mode": (lambda: conv_net(nn.BatchNorm2d(4).eval()), set()),
    "an output that is used elsewhere too": (Branching, {"one"}),
    "a layer that is called twice": (Reused, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_found_in_the_network(name: str) -> None:
    build, expected = CASES[name]
    torch.manual_seed(0)
    model = build()
    training = model.training
    ready(model)
    model.train(training)
    if name == "BatchNorm in eval mode":
        model[1].eval()  # type: ignore[index]
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model))
    assert found(optimizer) == expected


@pytest.mark.parametrize(
    "build",
    [
        NarrowResNet,
        partial(vgg11_bn, 128),
        pytest.param(MODELS["resnet18"], marks=pytest.mark.slow),
        pytest.param(vgg11_bn, marks=pytest.mark.slow),
    ],
    ids=["resnet18/4", "vgg11_bn/4", "resnet18", "vgg11_bn"],
)
def test_found_in_real_networks(build: Callable[[], nn.Module]) -> None:
    """Every convolution; not the classifier. And there ∂h̄ is noise, as the quantities themselves say."""
    torch.manual_seed(0)
    model = build()
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model, size=32))
    convolutions = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert found(optimizer) == convolutions
    quantities = KBFGSQuantities()
    with backpack(quantities):
        batch(model, 1, size=32)()
    for name, module in model.named_modules():
        if name in convolutions:
            q = quantities[module]
            assert q.dh_bar.norm() < q.dh_noise.norm()


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "other dampings": {"damping": lambda k: 0.5 * 2 ** (k % 3)},
    "bfloat16": {"direction_dtype": torch.bfloat16},
}


def changes_nothing_else(member: Member, change: str) -> bool:
    """Not with bfloat16 where H_A is kept as pairs: then M H_A is exact, and H_G of bfloat16 alone would round it."""
    spares = member.recipe.output_inverse.where_shifts_are_removed() is not None
    return spares and member.takes(*CHANGES[change]) and not (change == "bfloat16" and member.pairs_A)


@pytest.mark.parametrize(
    ("name", "change"), [(n, c) for c in CHANGES for n in rows(lambda member, c=c: changes_nothing_else(member, c))]
)
def test_nothing_else_changes(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the run that learns its noise pairs, which are all skipped."""
    monkeypatch.setattr(blocks, "kin", lambda layer: layer)  # sums are rounded alike, whoever else learns
    runs = []
    for spare in (True, False):
        torch.manual_seed(0)
        model = ready(conv_net(nn.BatchNorm2d(4)))
        optimizer = FAMILY[name].make(model, **{"lr": 0.05} | CHANGES[change])
        if not spare:  # as if there were none
            monkeypatch.setattr(normalized, "_needs_no_output_side", lambda *unused: False)
        for k in range(8):
            optimizer.step(batch(model, k))
        assert len(found(optimizer)) == spare
        state = optimizer.state[model[0].weight]
        counted = state.keys() - {"pairs_seen_G"}  # skipped pairs, and those that were not formed
        runs.append({**model.state_dict(), **{key: state[key] for key in counted}})
    assert runs[0].keys() == runs[1].keys() and {"momentum", "s_G"} <= runs[0].keys()
    assert not [key for key, value in runs[0].items() if not torch.equal(value, runs[1][key])]


@pytest.mark.parametrize("history_size", [1, 3], ids=["compact", "dense"])
def test_a_spared_layer_follows_the_damping(history_size: int) -> None:
    """H_G = I / λ_G in the direction, in what diagnostics say, and in the first direction without the normalization."""
    torch.manual_seed(0)
    model: Any = ready(conv_net(nn.BatchNorm2d(4)))
    damping = {1: 1.0, 2: 16.0}
    optimizer = KBFGSL.as_printed(
        model, history_size=history_size, **COMMON | {"damping": lambda k: damping.get(k, 4.0)}
    )
    for k in (1, 2):
        optimizer.step(batch(model, k))
        assert found(optimizer) == {"0"}
        G = optimizer.diagnostics(eigenvalues=True)[0].G
        scale = 14 / damping[k] ** 0.5  # 14 × 14 locations: λ_G = √λ / 14
        assert G is not None and G.smallest == pytest.approx(scale) and G.largest == pytest.approx(scale)
        assert 1 / G.damping == pytest.approx(scale)
    model[1].eval()
    optimizer.param_groups[0]["curvature_update_freq"] = 100  # a step in which nothing is learned any more
    state, W = optimizer.state[model[0].weight], model[0].weight.detach().clone()
    H_A = state["H_A"].clone()
    optimizer.step(batch(model, 3))
    P = 14 / 4.0 * (state["momentum"] @ H_A)[:, :27].reshape(W.shape)  # of the damping that it was formed with
    torch.testing.assert_close(model[0].weight.detach(), W - 0.05 * P, rtol=1e-5, atol=1e-6)


def test_the_second_pass_goes_no_deeper_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd builds a graph for the last layer alone."""
    torch.manual_seed(0)
    model = ready(conv_net(nn.BatchNorm2d(4)))
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model))
    graphs: list[tuple[bool, bool]] = []
    hooks = [
        m.register_forward_hook(lambda m, a, out: graphs.append((m is model[0], out.requires_grad)))
        for m in (model[0], model[4])
    ]  # type: ignore[index]
    optimizer.step(batch(model, 1))
    for hook in hooks:
        hook.remove()
    assert graphs == [(True, True), (False, True), (True, False), (False, True)]
    with optimizer.first_pass():
        batch(model, 2)()
    optimizer.step()
    assert optimizer.second_pass_layers == [model[4]] and optimizer.second_pass_due  # type: ignore[index]


def test_a_normalization_that_stops_removing_shifts_ends_it() -> None:
    """In eval mode BatchNorm is affine, ∂h̄ is a gradient like any other, and H_G learns from it for good."""
    torch.manual_seed(0)
    model: Any = ready(conv_net(nn.BatchNorm2d(4)))
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model, 0))
    assert found(optimizer) == {"0"}
    model[1].eval()
    for k in range(3):
        optimizer.step(batch(model, 1 + k))
    assert found(optimizer) == set()
    conv = optimizer.diagnostics()[0]
    assert conv.G is not None and conv.G.kept == 3
    model[1].train()
    optimizer.step(batch(model, 9))  # and what was learned is used again
    assert optimizer.diagnostics()[0].G.kept == 3


def test_a_first_batch_that_is_not_finite_decides_nothing() -> None:
    torch.manual_seed(0)
    model = ready(conv_net(nn.BatchNorm2d(4)))
    optimizer = KBFGS.as_printed(model, **COMMON)
    bad = batch(model)
    bad.x[0] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step(bad)
    model = ready(conv_net(nn.BatchNorm2d(4)))
    assert optimizer._preconditioner.normalized.known is None


def test_kfac_learns_there_too() -> None:
    """Γ is a second moment: it does not vanish with the mean."""
    torch.manual_seed(0)
    model: Any = ready(conv_net(nn.BatchNorm2d(4)))
    optimizer = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.05, damping=1.0)
    optimizer.step(batch(model))
    assert optimizer._preconditioner.normalized.known is None
    Gamma = optimizer.state[model[0].weight]["Gamma"]
    assert Gamma.abs().max() > 0


def test_a_row_without_an_output_side_runs_one_pass() -> None:
    """``ScaledIdentity`` everywhere: H_G = I / λ_G, and the closure runs once a step."""
    torch.manual_seed(0)
    model: Any = ready(conv_net(nn.BatchNorm2d(4)))
    recipe = replace(KBFGS.recipe_as_printed, output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE)
    optimizer = KroneckerOptimizer(model, recipe=recipe, **COMMON)
    calls = []
    minibatch = batch(model)

    def closure() -> Tensor:
        calls.append(1)
        return minibatch()

    losses = [float(optimizer.step(closure)) for _ in range(10)]
    assert len(calls) == 10 and losses[-1] < 0.5 * losses[0]
    for d in optimizer.diagnostics(eigenvalues=True):
        assert d.A is not None and d.A.kept == 9  # none of the minibatch that it was made from
        assert d.G is not None and d.G.smallest == d.G.largest == pytest.approx(1 / d.G.damping)


def test_hooks_are_gone_after_the_first_pass() -> None:
    torch.manual_seed(0)
    model = extend(ready(conv_net(nn.BatchNorm2d(4))))
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before


class PreActivation(nn.Module):
    """Each convolution is normalized on one path, and on the other scaled by a gain that starts at zero, or off."""

    def __init__(self, opens_at: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.gain, self.head = nn.Parameter(torch.zeros(())), nn.Linear(4, 5)
        self.open = opens_at == 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        rest = self.second(F.relu(self.norm(h)))
        return self.head((rest + self.gain * h if self.open else rest).mean((2, 3)))


@pytest.mark.parametrize("name", rows(lambda member: member.secant_G))
@pytest.mark.parametrize("opens_at", [0, 5])
def test_a_path_that_opens_later_is_noticed(opens_at: int, name: str) -> None:
    """Its gradient is zero in the step in which layers are looked at first."""
    model = ready(PreActivation(opens_at))
    optimizer = FAMILY[name].make(model, lr=0.05, damping=1.0)
    for k in range(9):
        model.open = k >= opens_at
        optimizer.step(batch(model, k))
    assert optimizer.state[model.first.weight]["pairs_seen_G"][0] > 0
    assert "first" not in found(optimizer)


def test_layers_are_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the number of steps with a due layer is a power of two: each look waits for the device."""
    model, looks = ready(conv_net(nn.BatchNorm2d(4))), []
    optimizer = KBFGS.as_printed(model, lr=0.05, damping=1.0, curvature_update_freq=2)
    settle = normalized.NormalizedLayers.settle

    def noted(*given: Any) -> None:
        looks.append(optimizer.param_groups[0]["step"] + 1)
        settle(*given)

    monkeypatch.setattr(normalized.NormalizedLayers, "settle", noted)
    for k in range(40):
        optimizer.step(batch(model, k))
    assert looks == [2, 4, 8, 16, 32]
