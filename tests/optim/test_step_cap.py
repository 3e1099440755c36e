"""step_cap: α² Σ⟨p, M⟩ ≤ κ |f|. Shortens the whole step, keeps its direction, and does not depend on units."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.linalg.splits import Given
from kfqn_ext.optim import KBFGS, KroneckerOptimizer, Minibatch
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY, firsts, one_per, rows

F64 = torch.float64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3)
    ).double()


def batch(model: nn.Module, k: int, scale: float = 1.0) -> Minibatch:
    x = torch.randn(8, 2, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
    return Minibatch(model, lambda output, y: scale * F.cross_entropy(output, y), x, torch.arange(8) % 3)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(make: Any, steps: int, scale: float = 1.0) -> list[Tensor]:
    model = net()
    optimizer, path = make(model), []
    for k in range(steps):
        optimizer.step(batch(model, k, scale))
        path.append(flat(model))
    return path


def plain(model: nn.Module, **options: Any) -> KBFGS:
    return KBFGS.as_printed(model, **{"lr": 0.3, "damping": 0.5, "curvature_update_freq": 1, **options})


class CappedReference(ref.ReferenceKBFGS):
    """The cap, from its formula: all parameters' α² ⟨p, M⟩ together, with rate α/λ where there is no block."""

    kappa = 0.0
    shortened: list[float]

    def step(self, x: Any, y: Any) -> Tensor:
        lr, model, state, other = self.lr, copy.deepcopy(self.model), copy.deepcopy(self.state), dict(self.other)
        first = ref.capture(model, self.loss_fn, x, y)
        square = 0.0
        for name, layer in first.layers.items():
            if name not in state:
                state[name] = self.initial(layer, layer.A)
            M = self.momentum * state[name].M + layer.DW
            square += float(lr**2 * (M * (state[name].H_G @ M @ state[name].H_A)).sum())
        for name in ("3.weight", "3.bias"):  # p = M / λ
            m = self.momentum * other.get(name, torch.zeros(())) + first.grads[name]
            square += float(lr**2 * (m * m).sum() / self.damping)
        nu = min(1.0, (self.kappa * abs(float(first.loss)) / square) ** 0.5)
        self.shortened.append(nu)
        self.lr = lr * nu
        loss = super().step(x, y)
        self.lr = lr
        return loss


@pytest.mark.parametrize("kappa", [1e-3, 0.3, 1e6])
def test_ten_steps_equal_the_formula(kappa: float) -> None:
    model, twin = net(), net()
    optimizer, reference = plain(model, step_cap=kappa), CappedReference(twin, F.cross_entropy, 0.3, 0.5)
    reference.kappa, reference.shortened = kappa, []
    for k in range(10):
        optimizer.step(batch(model, k))
        reference.step(batch(twin, k).x, batch(twin, k).y)
    assert_close(flat(model), flat(twin), 1e-10)
    bound = [nu < 1 for nu in reference.shortened]
    assert {1e-3: all(bound), 0.3: any(bound) and not all(bound), 1e6: not any(bound)}[kappa], reference.shortened


def test_a_cap_that_does_not_bind_changes_nothing() -> None:
    for got, want in zip(run(lambda m: plain(m, step_cap=1e6), 5), run(plain, 5), strict=True):
        assert torch.equal(got, want)


def test_a_first_step_that_is_capped_keeps_its_direction() -> None:
    start = flat(net())
    free, capped = (run(lambda m, cap=cap: plain(m, step_cap=cap), 1)[0] - start for cap in (None, 1e-4))
    assert 0 < capped.norm() < 0.5 * free.norm()
    assert_close(capped / capped.norm(), free / free.norm(), 1e-9)


@pytest.mark.parametrize("cap", [None, 0.02])
@pytest.mark.parametrize("c", [64.0, 1e-3])
def test_it_does_not_depend_on_the_unit_of_the_loss(c: float, cap: float | None) -> None:
    """A loss c f has c G for G, and with c λ_G for λ_G the trajectory of f."""

    def make(scale: float) -> Any:
        recipe = replace(KBFGS.recipe_as_printed, split=Given(1.0, 0.5 * scale))
        return lambda model: KroneckerOptimizer(
            model, recipe=recipe, lr=0.3, damping=0.5 * scale, curvature_update_freq=1, step_cap=cap
        )

    for got, want in zip(run(make(c), 8, scale=c), run(make(1.0), 8), strict=True):
        assert_close(got, want, 1e-8)
    if cap is not None:  # and the cap did bind
        assert not torch.allclose(run(make(1.0), 8)[-1], run(lambda m: plain(m, lr=0.3), 8)[-1])


def test_it_bounds_a_learning_rate_that_is_far_too_large() -> None:
    """Unbounded, the same run leaves every bound."""
    free, capped = run(lambda m: plain(m, lr=300.0), 12), run(lambda m: plain(m, lr=300.0, step_cap=0.5), 12)
    assert not capped[-1].abs().max() > 50
    assert not free[-1].abs().max() < 1000


CAPPED = rows(lambda member: member.takes("step_cap"))
each = pytest.mark.parametrize("name", one_per(lambda member: member.recipe.second_pass, CAPPED))


@pytest.mark.parametrize("name", CAPPED)
def test_every_member_has_it(name: str) -> None:
    def make(cap: float | None) -> Any:
        return lambda model: FAMILY[name].make(model, lr=0.3, damping=0.5, step_cap=cap)

    def sampled(cap: float | None) -> Tensor:
        model = net()
        optimizer = make(cap)(model)
        for k in range(3):
            minibatch = batch(model, k)
            minibatch.loss_fn = F.cross_entropy
            torch.manual_seed(k)
            optimizer.step(minibatch)
        return flat(model) - flat(net())

    assert sampled(1e-4).norm() < 0.5 * sampled(None).norm()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_bad_cap_is_refused(value: float) -> None:
    model = net()
    with pytest.raises(ValueError, match="Invalid step_cap"):
        KBFGS.as_printed(model, step_cap=value)
    assert not any(m._forward_hooks for m in model.modules())


def test_it_needs_the_loss() -> None:
    model = net()
    optimizer, before = plain(model, step_cap=1.0), flat(model)
    with optimizer.first_pass():
        batch(model, 0)()
    with pytest.raises(RuntimeError, match="step_cap compares the step with the loss"):
        optimizer.step()
    assert torch.equal(flat(model), before)


@each
def test_a_loss_that_is_a_number_is_as_good_as_a_tensor(name: str) -> None:
    def run_with(of: Any) -> Tensor:
        model = net()
        optimizer = FAMILY[name].make(model, lr=0.3, damping=0.5, step_cap=1e-3)
        for k in range(3):

            class Returns(Minibatch):
                def __call__(self) -> Any:
                    return of(super().__call__())

            minibatch = batch(model, k)
            torch.manual_seed(k)
            optimizer.step(Returns(model, F.cross_entropy, minibatch.x, minibatch.y))
        return flat(model)

    expected = run_with(lambda loss: loss)
    for of in (float, lambda loss: loss.reshape(1), lambda loss: loss.reshape(1, 1)):
        assert torch.equal(run_with(of), expected)


NO_LOSSES = {"None": None, "a vector": torch.ones(2), "a dictionary": {"loss": 1.0}, "a text": "0.5"}


@pytest.mark.parametrize("found", NO_LOSSES)
@pytest.mark.parametrize("name", firsts(lambda member: member.recipe.second_pass, CAPPED))
@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_no_loss_is_refused_before_anything_changes(name: str, steps: int, found: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.3, damping=0.5, step_cap=1.0)

    class Odd(Minibatch):
        def __call__(self) -> Any:
            super().__call__()
            return NO_LOSSES[found]

    good = Minibatch(model, F.cross_entropy, batch(model, 0).x, batch(model, 0).y)
    for _ in range(steps):
        optimizer.step(good)
    before, state = flat(model), copy.deepcopy(list(optimizer.state.values()))
    with pytest.raises(RuntimeError, match="step_cap compares the step with the loss.*one number, not"):
        optimizer.step(Odd(model, F.cross_entropy, good.x, good.y))
    assert torch.equal(flat(model), before)
    for old, new in zip(state, optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in new)
    optimizer.step(good)
    assert not torch.equal(flat(model), before)


@each
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("number", [False, True])
def test_a_loss_that_is_not_finite_is_a_bad_batch(name: str, value: float, number: bool) -> None:
    """Though its gradients are finite: nothing changes, with one warning."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.3, damping=0.5, step_cap=1.0)
    good = Minibatch(model, F.cross_entropy, batch(model, 0).x, batch(model, 0).y)

    class Bad(Minibatch):
        def __call__(self) -> Any:
            loss = super().__call__() * value
            return float(loss) if number else loss

    for _ in range(2):
        optimizer.step(good)
    before, state = flat(model), copy.deepcopy(list(optimizer.state.values()))
    with pytest.warns(UserWarning, match="a loss, that is not finite") as said:
        optimizer.step(Bad(model, F.cross_entropy, good.x, good.y))
    assert len(said) == 1 and torch.equal(flat(model), before)
    for old, new in zip(state, optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in new)
    optimizer.step(good)
    assert not torch.equal(flat(model), before) and flat(model).isfinite().all()


def test_a_closure_that_returns_no_loss_is_told_so() -> None:
    model = net()
    optimizer, before = plain(model, step_cap=1.0), flat(model)

    def closure() -> None:
        batch(model, 0)()

    with pytest.raises(RuntimeError, match="step_cap compares the step with the loss"):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert torch.equal(flat(model), before)
    optimizer.step(batch(model, 0))  # and the next one is as good as ever
    assert not torch.equal(flat(model), before)
