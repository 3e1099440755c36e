"""Hyperparameters as functions of the step: their values, by group, with T, and through a checkpoint."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import (
    KBFGS,
    KBFGSL,
    KFAC,
    Minibatch,
    ProvableKBFGSL,
    burn_in,
    dense_then,
    running_mean,
    theorem_step_sizes,
)
from tests.cases import assert_close
from tests.optim.family import FAMILY, rows

X, Y = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def batch(model: nn.Module) -> Minibatch:
    return Minibatch(model, F.cross_entropy, X, Y)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Counted(Minibatch):
    """Counts its evaluations."""

    passes = 0

    def __call__(self) -> Tensor:
        self.passes += 1
        return super().__call__()


# ------------------------------------------------------------------ the named ones


def test_burn_in_grows_in_proportion_to_the_steps_taken() -> None:
    T = burn_in(final=20, growth=20)
    assert [T(k) for k in (1, 19, 20, 39, 40, 59, 60, 399, 400, 10_000)] == [1, 1, 1, 1, 2, 2, 3, 19, 20, 20]
    assert all(T(k) == min(20, max(1, k // 20)) for k in range(1, 1000))
    assert [burn_in(3, 2)(k) for k in range(1, 10)] == [1, 1, 1, 2, 2, 3, 3, 3, 3]


def test_the_burn_in_costs_few_updates() -> None:
    """A published run of 320 steps with this schedule made 91 updates."""
    T = burn_in()
    assert sum(k % T(k) == 0 for k in range(1, 321)) == 91


def test_a_burn_in_of_little_growth_learns_every_few_steps_until_its_end() -> None:
    """As T = m divides k = m · growth."""
    T = burn_in(final=20, growth=5)
    due = [k for k in range(1, 141) if k % T(k) == 0]
    assert due == [*range(1, 11), 12, 14, 15, 18, 20, 24, *range(25, 101, 5), 120, 140]
    assert sum(k <= 100 for k in due) == 32


def test_dense_then_is_the_published_codes_schedule() -> None:
    T = dense_then(every=20, until=20)
    assert [k for k in range(1, 100) if k % T(k) == 0] == [*range(1, 21), 40, 60, 80]


def test_a_running_mean_is_the_mean_of_all_values_so_far_until_it_forgets() -> None:
    values, beta = torch.arange(1.0, 31.0) ** 2, running_mean(0.9)
    average = torch.tensor(123.0)  # forgotten at once
    for k, value in enumerate(values, start=1):
        average = beta(k) * average + (1 - beta(k)) * value
        assert k > 10 or torch.isclose(average, values[:k].mean())
    assert [beta(k) for k in (1, 2, 10, 11, 1000)] == [0.0, 0.5, 0.9, 0.9, 0.9]


# ------------------------------------------------------------------ in the step


def test_curvature_is_due_when_the_schedule_says_so() -> None:
    model, T = net(), burn_in(final=4, growth=3)
    optimizer = KBFGS.as_printed(model, lr=0.01, damping=1.0, curvature_update_freq=T)
    due = []
    for k in range(1, 26):
        closure = Counted(model, F.cross_entropy, X, Y)
        optimizer.step(closure)
        if closure.passes == 2:
            due.append(k)
    assert due == [k for k in range(1, 26) if k % T(k) == 0]


def test_inverses_are_due_when_their_schedule_says_so() -> None:
    model = net()
    optimizer = KFAC(
        model,
        recipe=KFAC.recipe_stable,
        momentum=0.9,
        lr=0.01,
        damping=1.0,
        inverse_update_freq=dense_then(every=4, until=3),
    )
    found = []
    for k in range(1, 13):
        before = optimizer.state[model[0].weight].get("H_G", torch.zeros(())).clone()
        optimizer.step(batch(model))
        after = optimizer.state[model[0].weight]["H_G"]
        if before.shape != after.shape or not torch.equal(before, after):
            found.append(k)
    assert found == [1, 2, 3, 4, 8, 12]


def rates(k: int) -> float:
    return 0.2 / k


def dampings(k: int) -> float:
    return 0.5 + 0.1 * k


@pytest.mark.parametrize("name", rows(lambda member: member.takes("damping", "weight_decay")))
def test_a_schedule_equals_setting_the_values_by_hand(name: str) -> None:
    """The value for step k is used in step k: for the direction, the dampings and the decay."""
    model, twin = net(), net()
    scheduled = FAMILY[name].make(model, lr=rates, damping=dampings, weight_decay=lambda k: 0.01 * k)
    by_hand = FAMILY[name].make(twin, lr=1.0, damping=dampings(1))
    for k in range(1, 8):
        by_hand.param_groups[0].update(lr=rates(k), damping=dampings(k), weight_decay=0.01 * k)
        torch.manual_seed(k)
        scheduled.step(batch(model))
        torch.manual_seed(k)
        by_hand.step(batch(twin))
        assert equal(model, twin)
        assert scheduled.param_groups[0]["lr"] == rates(k)  # what the step took, for anyone to read


def test_groups_have_their_own_schedules() -> None:
    model, twin = net(), net()
    first, last = list(model[0].parameters()), list(model[3].parameters())
    groups = [{"params": first, "lr": rates}, {"params": last, "curvature_update_freq": lambda k: 2 if k > 2 else 1}]
    optimizer = KBFGS.as_printed(model, groups, lr=0.01, damping=dampings, curvature_update_freq=3)
    groups = [{"params": list(twin[0].parameters())}, {"params": list(twin[3].parameters())}]
    by_hand = KBFGS.as_printed(twin, groups, lr=0.01, damping=1.0, curvature_update_freq=3)
    for k in range(1, 8):
        by_hand.param_groups[0].update(lr=rates(k), damping=dampings(k))
        by_hand.param_groups[1].update(damping=dampings(k), curvature_update_freq=2 if k > 2 else 1)
        optimizer.step(batch(model))
        by_hand.step(batch(twin))
        assert equal(model, twin)


def test_a_group_that_comes_later_starts_its_schedule_at_the_common_step() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, model[3].parameters(), lr=rates, damping=1.0)
    for _ in range(4):
        optimizer.step(batch(model))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": rates, "damping": dampings})
    assert [g["lr"] for g in optimizer.param_groups] == [rates(4), rates(5)]
    assert [g["damping"] for g in optimizer.param_groups] == [1.0, dampings(5)]
    optimizer.step(batch(model))
    assert [g["lr"] for g in optimizer.param_groups] == [rates(5), rates(5)]


def test_the_theorem_s_step_sizes_are_a_schedule() -> None:
    model = net()
    steps = theorem_step_sizes(0.5, 2.0, 1.0, 0.6)
    optimizer = ProvableKBFGSL(model, lr=steps)
    for k in range(1, 4):
        optimizer.step(batch(model))
        assert optimizer.param_groups[0]["lr"] == steps(k)


def test_a_damping_schedule_reaches_both_sides() -> None:
    model = net()
    optimizer = KBFGSL.as_printed(model, lr=0.01, damping=dampings, curvature_update_freq=1, history_size=3)
    for k in range(1, 5):
        optimizer.step(batch(model))
        state = optimizer.state[model[3].weight]
        assert_close(state["gamma_G"], torch.tensor(dampings(k) ** -0.5), 1e-6)  # L-BFGS restarts from I / λ_G


def test_torch_schedulers_still_work_on_a_plain_learning_rate() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, lr=0.4, damping=1.0, curvature_update_freq=burn_in(4, 2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for k in range(4):
        assert optimizer.param_groups[0]["lr"] == 0.4 * 0.5**k
        optimizer.step(batch(model))
        scheduler.step()


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("name", FAMILY)
def test_a_resumed_run_continues_its_schedules(name: str) -> None:
    def make(model: nn.Module) -> Any:
        options = FAMILY[name].taken(damping=dampings, inverse_update_freq=dense_then(3, 4))
        return FAMILY[name].make(model, lr=rates, T=burn_in(3, 2), **options)

    model = net()
    optimizer = make(model)
    for _ in range(5):
        optimizer.step(batch(model))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, file)
    for _ in range(5):
        optimizer.step(batch(model))

    file.seek(0)
    saved = torch.load(file, weights_only=True)  # numbers only: no functions in a checkpoint
    twin = net()
    resumed = make(twin)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    assert resumed.param_groups[0]["lr"] == rates(5)
    for _ in range(5):
        resumed.step(batch(twin))
    assert equal(model, twin)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == rates(10)


# ------------------------------------------------------------------ bad schedules


BAD: list[tuple[str, Any]] = [
    ("lr", lambda k: -1.0),
    ("damping", lambda k: 0.0),
    ("weight_decay", lambda k: float("nan")),
    ("curvature_update_freq", lambda k: 0),
    ("curvature_update_freq", lambda k: k / 2),
]


@pytest.mark.parametrize(("name", "schedule"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_schedule_that_starts_out_of_range_is_refused_at_once(name: str, schedule: Any) -> None:
    model = net()
    with pytest.raises(ValueError, match=f"Invalid .*{name}"):
        KBFGS.as_printed(model, **{name: schedule})
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "schedule"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_schedule_that_leaves_the_range_later_is_refused_by_name(name: str, schedule: Any) -> None:
    model, good = net(), {"lr": 0.01, "damping": 1.0, "weight_decay": 0.0, "curvature_update_freq": 1}
    optimizer = KBFGS.as_printed(model, **{**good, name: lambda k: good[name] if k < 3 else schedule(k)})
    with pytest.raises(ValueError, match=f"Invalid .*{name}"):
        for _ in range(4):
            optimizer.step(batch(model))


@pytest.mark.parametrize("name", ["momentum"])
def test_what_cannot_be_scheduled_says_so(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        KBFGS.as_printed(net(), **{name: lambda k: 0.9})
