"""Parameter groups, learning-rate schedules, partly frozen models, and the table that says who gets what."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from kfqn_ext.optim import KBFGS, Minibatch
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY, rows

F64 = torch.float64
each = pytest.mark.parametrize("name", FAMILY)
with_decay = pytest.mark.parametrize("name", rows(lambda member: member.takes("weight_decay")))
X, Y = torch.randn(8, 6, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def step(model: nn.Module, optimizer: Any, scale: float = 1.0) -> Tensor:
    torch.manual_seed(0)  # of sampled targets
    return optimizer.step(Minibatch(model, F.cross_entropy, scale * X, Y))


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def changed(module: nn.Module, before: list[Tensor]) -> bool:
    return any(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


@with_decay
def test_each_group_has_its_own_hyperparameters(name: str) -> None:
    """A first step of two groups equals the steps of two optimizers that have these values throughout."""
    start = net()
    first = {"lr": 0.2, "damping": 0.5, "weight_decay": 0.1}
    second = {"lr": 0.01, "damping": 3.0, "weight_decay": 0.0}
    model = copy.deepcopy(start)
    rest = [*model[1].parameters(), *model[3].parameters()]
    groups = [{"params": list(model[0].parameters()), **first}, {"params": rest, **second}]
    step(model, FAMILY[name].make(model, params=groups, lr=0.0))
    for hyperparameters, layers in ((first, (0,)), (second, (1, 3))):
        twin = copy.deepcopy(start)
        step(twin, FAMILY[name].make(twin, **hyperparameters))
        for i in layers:
            assert not changed(model[i], values(twin[i])) and changed(model[i], values(start[i]))


@each
def test_groups_learn_at_their_own_pace(name: str) -> None:
    model = net()
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[3].parameters()), FAMILY[name].T: 3},
    ]
    optimizer, learned, key = FAMILY[name].make(model, params=groups, lr=0.05, T=2), [], FAMILY[name].learned_A
    for k in range(6):
        before = [optimizer.state[model[i].weight].get(key, torch.zeros(())).clone() for i in (0, 3)]
        step(model, optimizer, scale=1 + 0.1 * k)
        after = [optimizer.state[model[i].weight][key] for i in (0, 3)]
        learned.append([a.shape == b.shape and not torch.equal(a, b) for a, b in zip(after, before, strict=True)])
    assert learned == [[False, False], [True, False], [False, True], [True, False], [False, False], [True, True]]


@each
def test_parameters_left_out_are_left_alone(name: str) -> None:
    model = net()
    optimizer, before = FAMILY[name].make(model, params=model[3].parameters(), lr=0.1), values(model)
    for _ in range(3):
        step(model, optimizer)
    assert not changed(model[:3], before[:4]) and changed(model[3], before[4:])
    assert model[0].weight.grad is not None


@each
def test_a_group_added_later_equals_a_group_from_the_start(name: str) -> None:
    """Added before the first step, it makes no difference; later, its layers start when they are first measured."""
    start = net()
    whole, parts = copy.deepcopy(start), copy.deepcopy(start)
    one = FAMILY[name].make(whole, lr=0.1, T=2)
    two = FAMILY[name].make(parts, params=parts[3].named_parameters(prefix="3"), lr=0.1, T=2)
    two.add_param_group({"params": [*parts[0].named_parameters("0"), *parts[1].named_parameters("1")]})
    for _ in range(4):
        assert torch.equal(step(whole, one), step(parts, two))
    assert not changed(whole, values(parts))

    late = copy.deepcopy(start)
    optimizer = FAMILY[name].make(late, params=late[3].parameters(), lr=0.1, T=2)
    step(late, optimizer)
    before = values(late)
    optimizer.add_param_group({"params": [*late[0].parameters(), *late[1].parameters()], "lr": 0.05})
    step(late, optimizer)  # the second step: due for all
    assert changed(late[0], before[:2]) and FAMILY[name].learned_A in optimizer.state[late[0].weight]
    assert "0.weight" in repr(optimizer) and optimizer.param_groups[1]["lr"] == 0.05
    for _ in range(5):
        loss = step(late, optimizer)
    assert loss < F.cross_entropy(start(X), Y)


@with_decay
def test_unfreezing_a_layer(name: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer, before = FAMILY[name].make(model, lr=0.1, weight_decay=0.1), values(model[0])
    for _ in range(2):
        step(model, optimizer)
    assert not changed(model[0], before)  # frozen: no decay either
    model[0].requires_grad_(True)
    for _ in range(2):
        step(model, optimizer)
    assert changed(model[0], before) and FAMILY[name].learned_A in optimizer.state[model[0].weight]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@with_decay
def test_a_half_frozen_layer(name: str, frozen: str) -> None:
    """Nothing frozen moves, and the rest trains."""
    model = net()
    getattr(model[3], frozen).requires_grad_(False)
    optimizer, before = FAMILY[name].make(model, lr=0.1, weight_decay=0.1), values(model[3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a layer without a trainable weight moves without a block
        for _ in range(3):
            step(model, optimizer)
    moved = [not torch.equal(p, q) for p, q in zip(model[3].parameters(), before, strict=True)]
    assert moved == [frozen != "weight", frozen != "bias"]


@with_decay
def test_a_layer_without_gradient_does_not_move(name: str) -> None:
    """Unused in the loss: neither momentum nor weight decay touches it, and there is nothing to warn about."""
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)}).double()
    model.forward = lambda x: model["used"](x)
    optimizer = FAMILY[name].make(model, lr=0.1, weight_decay=0.1)
    before = values(model["unused"])
    for _ in range(3):
        step(model, optimizer)
    assert not changed(model["unused"], before)


def test_other_parameters_take_the_momentum_direction_at_lr_over_damping() -> None:
    """LayerNorm's θ ← θ - α (m/λ + γθ) with m ← βm + g, in any order with the Kronecker layers."""
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    settings = {"lr": 0.2, "damping": 4.0, "weight_decay": 0.05}
    optimizer = KBFGS.as_printed(model, curvature_update_freq=1, momentum=0.7, **settings)
    reference = ref.ReferenceKBFGS(twin, F.cross_entropy, momentum=0.7, **settings)
    m = torch.zeros(5, dtype=F64)
    for _ in range(4):
        theta = model[1].weight.detach().clone()
        step(model, optimizer)
        reference.step(X, Y)
        m = 0.7 * m + model[1].weight.grad
        assert_close(model[1].weight.detach(), theta - 0.2 * (m / 4.0 + 0.05 * theta), 1e-14)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), 1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 2, 0.5),
        lambda o: LambdaLR(o, [lambda k: 1 / (k + 1), lambda k: 1 / (k + 2)]),
        lambda o: OneCycleLR(o, [0.3, 0.1], total_steps=8, cycle_momentum=False),
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), StepLR(o, 1, 0.5)], [2]),
    ],
    ids=["StepLR", "LambdaLR", "OneCycleLR", "SequentialLR"],
)
def test_schedulers_set_the_rate_of_each_step(make: Any) -> None:
    """The run equals one in which the rates are written into the groups by hand."""
    start, rates = net(), []
    scheduled, by_hand = copy.deepcopy(start), copy.deepcopy(start)

    def build(model: Any) -> Any:
        rest = [*model[1].parameters(), *model[3].parameters()]
        groups = [{"params": list(model[0].parameters()), "lr": 0.2}, {"params": rest, "lr": 0.1}]
        return KBFGS.as_printed(model, groups, damping=1.0, curvature_update_freq=2)

    optimizer = build(scheduled)
    schedule = make(optimizer)
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        step(scheduled, optimizer)
        schedule.step()
    assert len({rate for rate, _ in rates}) > 2
    optimizer = build(by_hand)
    for pair in rates:
        for group, rate in zip(optimizer.param_groups, pair, strict=True):
            group["lr"] = rate
        step(by_hand, optimizer)
    assert not changed(scheduled, values(by_hand))


def test_plateau_scheduler_and_schedule_after_loading() -> None:
    """load_state_dict replaces the groups: a scheduler built before must still move the rate."""
    model = net()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0)
    plateau, schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0), StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plateau.step(1.0)
    plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    optimizer.param_groups[0]["lr"] = 0.0
    before = values(model)
    step(model, optimizer)
    assert not changed(model, before)


def test_a_tensor_rate_equals_a_number() -> None:
    start = net()
    results = []
    for lr in (0.1, torch.tensor(0.1, dtype=F64), torch.tensor([0.1], dtype=F64)):
        model = copy.deepcopy(start)
        optimizer = KBFGS.as_printed(model, lr=lr, damping=1.0, curvature_update_freq=1, weight_decay=0.01)
        for _ in range(3):
            step(model, optimizer)
        results.append(values(model))
    for other in results[1:]:
        for p, q in zip(other, results[0], strict=True):
            assert_close(p, q, 1e-14)


@each
def test_repr_says_which_parameter_gets_which_treatment_and_why(name: str) -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 6, 3, groups=2),
            "norm": nn.BatchNorm2d(6),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            "linear": nn.Linear(6, 3),
        }
    )
    optimizer = FAMILY[name].make(model, lr=0.125, damping=0.5625)
    text = repr(optimizer)
    lines = {line.split()[0]: line for line in text.splitlines() if "." in line.split()[0]}
    assert lines.keys() >= {of for of, _ in model.named_parameters()}
    assert "lr=0.125" in text and "damping=0.5625" in text and text.startswith(type(optimizer).__name__)
    assert (
        "Kronecker" in lines["conv.weight"]
        and "2 × [3²]" in lines["conv.weight"]
        and "2 × [19²]" in lines["conv.weight"]
    )
    assert "Kronecker" in lines["conv.bias"] and "Kronecker" in lines["linear.weight"]
    assert optimizer.recipe.others.title in lines["norm.weight"] and "BatchNorm2d" in lines["norm.weight"]
    normed = [line for of, line in lines.items() if of.startswith("normed")]
    assert (
        len(normed) == 3
        and all(optimizer.recipe.others.title in line for line in normed)
        and "parametrized" in lines["normed.bias"]
    )


@each
def test_repr_says_how_much_has_a_block_and_what_is_scheduled(name: str) -> None:
    model, member = net(), FAMILY[name]
    optimizer = member.make(model, lr=lambda k: 0.5 / k, T=lambda k: 2)
    text, covered = repr(optimizer), 6 * 5 + 5 + 5 * 3 + 3
    assert f"in blocks: {100 * covered / (covered + 10):.1f}% of 63 parameters" in text
    assert f"{member.T}=2 (a function of the step)" in text and "lr=0.5 (a function of the step)" in text
    assert ("inverse_update_freq" in text) == optimizer.recipe.recomputes
    assert member.samples <= optimizer.recipe.recomputes and not (member.action_A and optimizer.recipe.recomputes)
    step(model, optimizer)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    assert f"{member.T}=2 (a function" in repr(optimizer) and "lr=0.125," in repr(optimizer)


def test_tied_weights_take_the_momentum_direction() -> None:
    """One weight of two modules: its gradient is a sum over both, which is no layer's."""
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    model = nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    assert "belongs to several modules" in repr(optimizer)
    first = step(model, optimizer)
    for _ in range(5):
        last = step(model, optimizer)
    assert last < first and "H_A" not in optimizer.state[a.weight] and "H_A" in optimizer.state[model[4].weight]


@each
def test_a_module_used_twice_is_one_layer(name: str) -> None:
    """The same module twice in a forward pass: its calls merge, and its momentum is autograd's gradient."""
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = FAMILY[name].make(model, lr=0.05)
    first = step(model, optimizer)
    for _ in range(10):
        last = step(model, optimizer)
    assert last < first and FAMILY[name].learned_A in optimizer.state[layer.weight]
    assert not FAMILY[name].secant_G or optimizer.state[layer.weight]["s_G"].any()
