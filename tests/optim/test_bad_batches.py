"""One batch that is not finite changes nothing that was learned, for every member of the family, with one warning."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY, OPTIONS, firsts, rows, varied

CASES = varied("curvature from a part")
each = pytest.mark.parametrize(("name", "option"), CASES)


def make(name: str, option: str, model: nn.Module, damping: float = 0.5) -> Any:
    return FAMILY[name].make(model, **{"lr": 0.05, "damping": damping} | OPTIONS[option])


class Switch(nn.Module):
    """Passes its input on, or makes it NaN: at the calls of a forward pass whose numbers are given."""

    def __init__(self) -> None:
        super().__init__()
        self._calls, self.bad_calls = [], set()  # a number would be put back after a second pass

    @property
    def calls(self) -> int:
        return len(self._calls)

    def forward(self, x: Tensor) -> Tensor:
        self._calls.append(1)
        return x * float("nan") if self.calls in self.bad_calls else x


def net() -> nn.Sequential:
    """With groups, a layer without bias, and LayerNorm's parameters, which have no block."""
    torch.manual_seed(0)
    return nn.Sequential(
        Switch(),
        nn.Conv2d(2, 4, 3, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def batch(model: nn.Module, k: int, spoil: str = "") -> Minibatch:
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(6, 2, 4, 4, generator=generator), torch.arange(6) % 3
    one_hot = F.one_hot(y, 3).float()
    if spoil in ("x nan", "x inf"):
        x[0, 0, 0, 0] = float(spoil[2:])
    if spoil == "x huge":
        x[0] = 3e38  # finite, but a sum of it is not
    if spoil == "y nan":
        one_hot[1, 1] = float("nan")  # the inputs of all layers are finite
    if spoil == "y inf":
        one_hot[1, 1] = float("inf")
    return Minibatch(model, F.mse_loss, x, one_hot)


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and all state: momenta, inverses, moving averages, pairs, counters."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = value.clone()
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def assert_finite(model: nn.Module, optimizer: Any) -> None:
    found = snapshot(model, optimizer).items()
    # The leverage of inputs that are too large is what it is; a person reads it, nothing is computed from it.
    assert not [name for name, value in found if "leverage" not in name and not torch.isfinite(value).all()]


def skip_a_step(optimizer: Any) -> None:
    """Count one that is not taken, as with a bad batch: what is a function of k sees the next k."""
    for group in optimizer.param_groups:
        group["step"] += 1


def messages(step: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught]


KINDS = firsts(lambda member: member.recipe.second_pass)
# Bad inputs spoil everything from the first layer on; bad targets leave the inputs of all layers finite.
each_kind = pytest.mark.parametrize(
    ("name", "option", "spoil"),
    [
        *(pytest.param(*case.values, "x nan", marks=case.marks) for case in CASES),
        *(pytest.param(*case.values, "y inf", marks=pytest.mark.slow) for case in CASES if case.values[0] not in KINDS),
        *(pytest.param(*case.values, "y inf", marks=case.marks) for case in CASES if case.values[0] in KINDS),
        *((name, "plain", spoil) for name in KINDS for spoil in ("x inf", "y nan")),
    ],
)


@each_kind
def test_a_bad_batch_changes_nothing(name: str, option: str, spoil: str) -> None:
    model = net()
    optimizer = make(name, option, model)
    for k in range(3):
        optimizer.step(batch(model, k))
    before = snapshot(model, optimizer)
    found = messages(lambda: optimizer.step(batch(model, 9, spoil)))
    assert_same(snapshot(model, optimizer), before)
    assert len(found) == 1 and "not finite" in found[0], found
    # Once: the second one is as harmless, and silent.
    assert messages(lambda: optimizer.step(batch(model, 9, spoil))) == []
    assert_same(snapshot(model, optimizer), before)
    for k in range(3, 6):
        assert messages(lambda k=k: optimizer.step(batch(model, k))) == []
    assert_finite(model, optimizer)
    assert not torch.equal(snapshot(model, optimizer)["1.weight"], before["1.weight"])


@each
def test_training_goes_on_as_if_the_bad_batch_had_not_been(name: str, option: str) -> None:
    model, twin = net(), net()
    optimizer, undisturbed = make(name, option, model), make(name, option, twin)

    def step(which: Any, of: nn.Module, k: int, spoil: str = "") -> None:
        torch.manual_seed(k)  # the seeds of sampled targets
        which.step(batch(of, k, spoil))

    for k in range(3):
        step(optimizer, model, k)
        step(undisturbed, twin, k)
    assert len(messages(lambda: step(optimizer, model, 9, "x nan"))) == 1
    skip_a_step(undisturbed)
    for k in range(3, 7):
        step(optimizer, model, k)
        step(undisturbed, twin, k)
    assert_same(snapshot(model, optimizer), snapshot(twin, undisturbed))


@each_kind
def test_a_bad_first_batch(name: str, option: str, spoil: str) -> None:
    """There is no curvature to keep; what is made of it, where the inputs are finite, is A alone."""
    model = net()
    optimizer, before = make(name, option, model), copy.deepcopy(model.state_dict())
    found = messages(lambda: optimizer.step(batch(model, 9, spoil)))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert len(found) == 1 and "not finite" in found[0], found
    assert_finite(model, optimizer)

    twin = net()
    undisturbed = make(name, option, twin)
    skip_a_step(undisturbed)
    for k in range(4):
        torch.manual_seed(k)
        assert messages(lambda k=k: optimizer.step(batch(model, k))) == []
        torch.manual_seed(k)
        undisturbed.step(batch(twin, k))
    assert_finite(model, optimizer)
    if spoil == "x nan":
        assert_same(snapshot(model, optimizer), snapshot(twin, undisturbed))


@each
def test_inputs_too_large_for_a_second_moment(name: str, option: str) -> None:
    """3e38 is finite, and so are the gradients behind a saturated tanh; its square is not, and no A takes it in."""
    model = net()
    optimizer = make(name, option, model)
    for k in range(2):
        optimizer.step(batch(model, k))
    messages(lambda: optimizer.step(batch(model, 2, "x huge")))
    assert_finite(model, optimizer)
    for k in range(3, 5):
        assert messages(lambda k=k: optimizer.step(batch(model, k))) == []
    assert_finite(model, optimizer)


@pytest.mark.parametrize(
    ("name", "option"), varied("curvature from a part", names=rows(lambda member: member.passes == 2))
)
def test_only_the_second_pass_is_bad(name: str, option: str) -> None:
    """The step has been taken, or is taken; nothing is learned from the pass that is not finite."""
    model = net()
    optimizer, switch = make(name, option, model), model[0]
    for k in range(3):
        optimizer.step(batch(model, k))
    before = snapshot(model, optimizer)
    switch.bad_calls = {switch.calls + 2}
    found = messages(lambda: optimizer.step(batch(model, 3)))
    assert switch.calls in switch.bad_calls  # there was a second pass, and it was bad
    after = snapshot(model, optimizer)
    assert_finite(model, optimizer)
    kept = {"H_G", "s_G", "y_G", "pairs_G", "Gamma", "Omega"}
    if FAMILY[name].reads_traces and FAMILY[name].limited:
        kept.remove("H_G")  # formed from the pairs and today's λ_G, which the first pass tells
    learned = [key for key in after if key.split(" ")[-1] in kept]
    assert learned and not [key for key in learned if not torch.equal(after[key], before[key])]
    assert not torch.equal(after["1.weight"], before["1.weight"])  # the first pass was good
    assert len(found) == 1 and "not finite" in found[0], found
    for k in range(4, 7):
        assert messages(lambda k=k: optimizer.step(batch(model, k))) == []
    assert_finite(model, optimizer)


@each
def test_a_bad_batch_where_curvature_is_not_due(name: str, option: str) -> None:
    model = net()
    optimizer = make(name, option, model)
    for group in optimizer.param_groups:
        group[FAMILY[name].T] = 4
    optimizer.step(batch(model, 0))
    before = snapshot(model, optimizer)
    assert len(messages(lambda: optimizer.step(batch(model, 9, "x nan")))) == 1
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize(("name", "option"), varied("curvature from a part", "step cap"))  # it needs a closure's loss
def test_a_bad_batch_in_a_loop_without_closures(name: str, option: str) -> None:
    model = net()
    optimizer = make(name, option, model)

    def second_pass(minibatch: Minibatch, seed: int) -> None:
        if optimizer.second_pass_due:
            with optimizer.second_pass():
                minibatch.sampled(seed) if optimizer.recipe.second_pass.sampled else minibatch()

    def step(k: int, spoil: str = "") -> None:
        minibatch = batch(model, k, spoil)
        with optimizer.first_pass():
            minibatch()
        second_pass(minibatch, k)
        optimizer.step()
        second_pass(minibatch, k)

    for k in range(3):
        step(k)
    before = snapshot(model, optimizer)
    assert len(messages(lambda: step(9, "x nan"))) == 1
    assert_same(snapshot(model, optimizer), before)


@each
def test_a_bad_layer_gradient_alone_spoils_the_whole_batch(name: str, option: str) -> None:
    """Part of a model without a NaN does not move either: one batch, one decision."""
    model = net()
    optimizer = make(name, option, model)
    for k in range(2):
        optimizer.step(batch(model, k))
    before = snapshot(model, optimizer)

    class Poisoned(Minibatch):
        def __call__(self) -> Tensor:
            loss = super().__call__()
            if model[1].weight.grad is not None:
                model[1].weight.grad[0] = float("nan")
            return loss

    good = batch(model, 5)
    assert len(messages(lambda: optimizer.step(Poisoned(model, good.loss_fn, good.x, good.y)))) == 1
    assert_same(snapshot(model, optimizer), before)


# ------------------------------------------------------------------ rounding noise is no news


@pytest.mark.parametrize("kind", [nn.Conv2d, pytest.param(nn.Linear, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "option"), varied("curvature from a part", names=rows(lambda member: member.secant_G))
)
def test_a_layer_before_batch_norm_keeps_its_initial_H_G(name: str, option: str, kind: Any) -> None:
    """∂h̄ = 0 there, because BatchNorm removes shifts. In float32, exactly the inverse that it started from."""
    torch.manual_seed(0)
    layer, norm = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)) if kind is nn.Conv2d else (nn.Linear(8, 4), nn.BatchNorm1d(4))
    model: Any = nn.Sequential(layer, norm, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3))
    shape = (16, 2, 6, 6) if kind is nn.Conv2d else (16, 8)
    model(torch.randn(shape))
    # λ_G² below the loss's curvature in h, 2/3, to which the identity has then something to learn.
    optimizer = make(name, option, model, damping=0.1)
    initial, learned = {}, {}
    for k in range(12):
        x = torch.randn(shape)
        y = F.one_hot((x.flatten(1).mean(1) > 0).long(), 3).float()
        optimizer.step(Minibatch(model, F.mse_loss, x, y))
        for m, found in ((model[0], initial), (model[4], learned)):
            state, d = optimizer.state[m.weight], len(m.weight)
            found[k] = optimizer.recipe.output_inverse.precondition(state, torch.eye(d)).clone()
    lambda_G = next(d.G.damping for d in optimizer.diagnostics() if d.name == "0" and d.G is not None)
    scale = float(optimizer.recipe.output_inverse.initial(torch.tensor(lambda_G, dtype=torch.float64)))
    for k, H in initial.items():
        eye = torch.eye(4) * (H[0, 0] if FAMILY[name].reads_traces else scale)  # π moves with the traces
        assert torch.equal(H, eye), (k, H)
    assert not optimizer.state[model[0].weight]["s_G"].any()
    d = optimizer.diagnostics()[0]
    assert d.G is not None and d.G.kept == d.G.skipped == 0  # no pair was formed
    assert (learned[11] - learned[11].diagonal().mean() * torch.eye(3)).abs().max() > 1e-3  # elsewhere it is learned
