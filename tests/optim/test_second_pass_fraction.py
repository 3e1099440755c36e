"""``second_pass_fraction``: curvature from the first data of a minibatch, the gradient from all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from kfqn_ext import extend
from kfqn_ext.extensions import InputQuantities, KBFGSQuantities
from kfqn_ext.optim import KBFGS, KBFGSL, KFAC, KroneckerOptimizer, Minibatch
from kfqn_ext.optim.inverses import ScaledIdentity
from kfqn_ext.optim.recipe import SecondPass
from tests.optim.family import FAMILY, rows

COMMON: dict[str, Any] = {"lr": 0.05, "damping": 1.0, "curvature_update_freq": 1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()


def data(k: int, size: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(size, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


def loss_fn(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: F.cross_entropy(output, y, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.25, 0.3, 1.0])
def test_a_share_is_the_first_data(share: float, reduction: str) -> None:
    """In one pass over the whole batch, the quantities of a pass over its first data: 3 of 10, 3 of 10, 10 of 10."""
    model, (x, y) = extend(net()), data(0)
    part, alone = KBFGSQuantities(reduction, subsampling=share), KBFGSQuantities(reduction)
    with backpack(part):
        loss_fn(reduction)(model(x), y).backward()
    size = 10 if share == 1 else 3
    with backpack(alone):
        loss_fn(reduction)(model(x[:size]), y[:size]).backward()
    for module in (model[0], model[3]):
        p, q = part[module], alone[module]
        assert p.num_data == size
        for name in ("a_bar", "h_bar", "dh_bar"):
            torch.testing.assert_close(getattr(p, name), getattr(q, name), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(p.A @ p.a_bar, q.A @ q.a_bar, rtol=1e-12, atol=1e-14)


def by_hand(share: float, reduction: str) -> tuple[nn.Module, Any]:
    """The gradient of the whole batch, and pairs of two passes over its first data."""
    model = net()
    optimizer = KBFGS.as_printed(model, reduction=reduction, second_pass_fraction=share, **COMMON)
    for k in range(6):
        x, y = data(k)
        with optimizer.first_pass():
            optimizer.zero_grad()
            loss_fn(reduction)(model(x), y).backward()
        optimizer.step()
        with optimizer.second_pass():
            loss_fn(reduction)(model(x[:4]), y[:4]).backward()
    return model, optimizer


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_minibatch_runs_its_part(reduction: str) -> None:
    expected, _ = by_hand(0.4, reduction)
    model = net()
    optimizer = KBFGS.as_printed(model, reduction=reduction, second_pass_fraction=0.4, **COMMON)
    for k in range(6):
        optimizer.step(Minibatch(model, loss_fn(reduction), *data(k)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    assert all(d.G is not None and d.G.kept == 6 for d in optimizer.diagnostics())


def test_pairs_are_those_of_the_part() -> None:
    """s_G and y_G after one step: Δh̄ and Δ∂h̄ of the first four data under the whole batch's step, by autograd."""
    model = net()
    optimizer = KBFGS.as_printed(model, second_pass_fraction=0.4, **COMMON)
    x, y = data(0)

    def means() -> tuple[Tensor, Tensor]:
        h = model[:3](x[:4]) @ model[3].weight.T + model[3].bias
        h = h.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(h, y[:4]), h)
        return h.detach().mean(0), g.sum(0)

    before = means()
    optimizer.step(Minibatch(model, F.cross_entropy, x, y))
    after = means()
    state = optimizer.state[model[3].weight]
    for name, old, new in zip(("s_G", "y_G"), before, after, strict=True):
        torch.testing.assert_close(state[name], 0.1 * (new - old), rtol=1e-10, atol=1e-14)


def test_the_gradient_is_that_of_all_data() -> None:
    """The first step, before anything was learned, is the same."""
    runs = []
    for share in (1.0, 0.2):
        model = net()
        KBFGS.as_printed(model, second_pass_fraction=share, **COMMON).step(Minibatch(model, F.cross_entropy, *data(0)))
        runs.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def test_kfac_takes_its_factors_from_the_part() -> None:
    """Ω of the first minibatch is that of its first data."""
    model = net()
    optimizer = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.05, damping=1.0, second_pass_fraction=0.4)
    x, y = data(0)
    a = torch.cat((model[:3](x[:4]).detach(), torch.ones(4, 1, dtype=x.dtype)), 1)
    optimizer.step(Minibatch(model, nn.CrossEntropyLoss(), x, y))
    torch.testing.assert_close(optimizer.state[model[3].weight]["Omega"], a.T @ a / 4, rtol=1e-12, atol=1e-14)


def test_a_second_pass_over_other_data_is_noticed() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, second_pass_fraction=0.4, **COMMON)
    x, y = data(0)
    with optimizer.first_pass():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="4 data at .* in the first pass and 10"), optimizer.second_pass():
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="second_pass_fraction"):
        KBFGS.as_printed(net(), second_pass_fraction=share, **COMMON)


class Sizes:
    """How many data each measurement took, by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[nn.Module, list[int]] = {}
        measure = InputQuantities.measure

        def watch(ext: InputQuantities[Any], module: nn.Module, layer: Any) -> Any:
            self.found.setdefault(module, []).append(layer.num_data)
            return measure(ext, module, layer)

        monkeypatch.setattr(InputQuantities, "measure", watch)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(5), nn.Dropout(0.1)], ids=["BatchNorm", "Dropout"])
def test_modules_that_look_at_the_batch_get_all_of_it(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass takes the whole minibatch; before the normalization A s alone is of the part."""
    model = nn.Sequential(nn.Linear(4, 5), module, nn.Linear(5, 3))
    optimizer, sizes = KBFGSL.as_printed(model, second_pass_fraction=0.5, **COMMON), Sizes(monkeypatch)
    minibatch = Minibatch(model, F.cross_entropy, torch.randn(8, 4), torch.arange(8) % 3)
    for _ in range(2):
        optimizer.step(minibatch)  # finds the layers before a normalization, and looks again
    sizes.found.clear()
    optimizer.step(minibatch)
    before = [4] if isinstance(module, nn.BatchNorm1d) else [8, 8]
    assert sizes.found == {model[2]: [8, 8], model[0]: before}
    module.eval()
    sizes.found.clear()
    optimizer.step(minibatch)
    assert sizes.found == {model[2]: [4, 4], model[0]: [4, 4]}


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x[:, None].expand(-1, 3, -1)
        return super().forward(x, x, x, need_weights=False)[0].mean(1)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "F.dropout": FunctionalDropout,
    "RReLU": nn.RReLU,
    "StochasticDepth": lambda: StochasticDepth(0.5, "row"),
    "attention": lambda: Attention(6, 2, dropout=0.5, batch_first=True),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DRAWING)
def test_modules_that_draw_random_numbers_get_all_of_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module need be known for it: the generators tell. The first such pass was of a part and teaches nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), DRAWING[name](), nn.Linear(6, 6), DRAWING[name](), nn.Linear(6, 3))
    optimizer = KBFGSL.as_printed(model, second_pass_fraction=0.5, **COMMON | {"lr": 0.0})
    sizes = Sizes(monkeypatch)
    minibatch = Minibatch(model, F.cross_entropy, torch.randn(8, 4), torch.arange(8) % 3)
    last = model[4]
    for expected in ([4], [8, 8], [8, 8]):
        sizes.found.clear()
        optimizer.step(minibatch)
        assert sizes.found[last] == expected
    state = optimizer.state[last.weight]
    assert not state["s_G"].any() and not state["y_G"].any()  # nothing moved, so both passes agree
    assert state["pairs_seen_A"].sum() == 2
    model.eval()
    for expected in ([8, 8], [4, 4]):  # the last step of this kind finds out that there is nothing to draw any more
        sizes.found.clear()
        optimizer.step(minibatch)
        assert sizes.found[last] == expected
    assert not state["s_G"].any()


def test_random_numbers_of_a_closure_count_too() -> None:
    """Noise on the data: the first rows of a part's noise are not those of the whole's."""
    torch.manual_seed(0)
    model = net()

    class Noisy(Minibatch):
        def loss(self) -> Tensor:
            noise = torch.randn_like(self.x.flip(0)).flip(0)
            return self._checked(self.loss_fn(self.model(self.x + noise), self.y))

        def fraction(self, fraction: float) -> "Noisy":
            part = super().fraction(fraction)
            return Noisy(part.model, part.loss_fn, part.x, part.y)

    optimizer = KBFGS.as_printed(model, second_pass_fraction=0.4, **COMMON | {"lr": 0.0})
    for k in range(3):
        optimizer.step(Noisy(model, F.cross_entropy, *data(k)))
    assert not optimizer.state[model[3].weight]["s_G"].any()


def test_without_a_second_pass_every_closure_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    recipe = replace(KBFGS.recipe_as_printed, output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE)
    optimizer, sizes = KroneckerOptimizer(model, recipe=recipe, second_pass_fraction=0.5, **COMMON), Sizes(monkeypatch)
    minibatch = Minibatch(model, F.cross_entropy, torch.randn(8, 4), torch.arange(8) % 3)
    for _ in range(3):
        optimizer.step(lambda: minibatch())
    assert all(set(taken) == {4} for taken in sizes.found.values()) and len(sizes.found) == 2


def test_closures_without_parts_are_refused() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, second_pass_fraction=0.5, **COMMON)
    with pytest.raises(TypeError, match="Pass a Minibatch"):
        optimizer.step(lambda: F.cross_entropy(model(data(0)[0]), data(0)[1]))
    with pytest.raises(TypeError, match="can't take a part of int"):
        Minibatch(model, F.cross_entropy, {"x": 1}, None).fraction(0.5)


@pytest.mark.parametrize("name", rows(lambda member: member.takes("second_pass_fraction") and member.passes == 2))
def test_data_that_cannot_be_cut_are_refused_before_the_step(name: str) -> None:
    class OfDictionaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.linear(torch.tensor(batch["x"]))

    model = OfDictionaries()
    optimizer = FAMILY[name].make(model, lr=0.1, second_pass_fraction=0.5)
    before = model.linear.weight.detach().clone()
    with pytest.raises(TypeError, match="can't take a part of float.*second_pass_fraction=1.0"):
        optimizer.step(Minibatch(model, F.cross_entropy, ({"x": [[1.0] * 4] * 6},), torch.arange(6) % 3))
    assert torch.equal(model.linear.weight, before) and not optimizer.state
    assert optimizer.param_groups[0]["step"] == 0 and model.linear.weight.grad is None
