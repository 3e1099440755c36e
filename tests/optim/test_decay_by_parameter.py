"""Weights in one group and biases in another, as most training scripts build them: one step, two weight decays."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests.optim.family import FAMILY, classes, rows

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
each_class = pytest.mark.parametrize("name", classes())


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def groups(model: nn.Module, **of_vectors: Any) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, **of_vectors}]


def step(model: nn.Module, optimizer: Any) -> Tensor:
    torch.manual_seed(0)  # of sampled targets
    loss: Tensor = optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    return loss


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ------------------------------------------------------------------ what may differ

OTHER_VALUES = {"lr": 0.2, "damping": 2.0, "T": 3, "inverse_update_freq": 3, "momentum": 0.3}
OTHER_VALUES |= {"direction_dtype": torch.bfloat16}
each_value = pytest.mark.parametrize("key", OTHER_VALUES)


@each_class
@each_value
def test_nothing_but_the_decay_may_differ_in_the_beginning(name: str, key: str) -> None:
    model, member = net(), FAMILY[name]
    key_here = member.T if key == "T" else key
    message = rf"Weight and bias of 0, 3 are one matrix .* groups 0 and 1 have the {key_here} .* Only weight_decay"
    with pytest.raises(ValueError, match=message):
        member.make(model, params=groups(model, **{key_here: OTHER_VALUES[key]}), lr=0.1)
    assert not any(m._forward_hooks for m in model.modules())


@each_class
@each_value
def test_nothing_but_the_decay_may_differ_later(name: str, key: str) -> None:
    """Refused before anything has moved; with equal values training goes on."""
    model, member = net(), FAMILY[name]
    optimizer, key_here = member.make(model, params=groups(model), lr=0.1), member.T if key == "T" else key
    step(model, optimizer)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0][key_here] = OTHER_VALUES[key]
    with pytest.raises(ValueError, match=f"have the {key_here} "):
        step(model, optimizer)
    assert same(model, before)
    for i, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[i][k]) for k, value in entry.items())
    optimizer.param_groups[1][key_here] = OTHER_VALUES[key]
    step(model, optimizer)
    assert not same(model, before)


def test_one_scheduler_for_both_groups() -> None:
    model, by_hand = net(), net()
    optimizer, other = (KBFGS(m, groups(m), lr=0.1) for m in (model, by_hand))
    scheduler = CosineAnnealingLR(optimizer, 5)
    for _ in range(4):
        for group in other.param_groups:
            group["lr"] = scheduler.get_last_lr()[0]
        step(model, optimizer)
        step(by_hand, other)
        scheduler.step()
    assert same(model, by_hand)
    optimizer = KBFGS(model, groups(model), lr=0.1)
    LambdaLR(optimizer, [lambda k: 1.0, lambda k: 0.5])
    with pytest.raises(ValueError, match=r"have the lr 0.1 and 0.05"):
        step(model, optimizer)


@pytest.mark.parametrize("make", [lambda: 0.05, lambda: torch.tensor(0.05), lambda: lambda k: 0.1 / k])
@pytest.mark.parametrize("decay", [0.0, lambda k: 0.01 * k], ids=["number", "function"])
def test_rates_and_decays_of_every_kind(make: Any, decay: Any) -> None:
    """A number, a tensor for each group, a function of the step."""
    model, twin = net(), net()
    one, two = groups(model)
    optimizer = KBFGS(model, [{**one, "lr": make()}, {**two, "lr": make(), "weight_decay": decay}])
    other = KBFGS(twin, groups(twin))
    for k in range(1, 5):
        rate = make()
        for group in other.param_groups:
            group["lr"] = float(rate(k) if callable(rate) else rate)
        other.param_groups[1]["weight_decay"] = decay(k) if callable(decay) else decay
        step(model, optimizer)
        step(twin, other)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_functions_that_part_later() -> None:
    """The step that would need two rates is refused, and the groups keep the values of the step before."""
    model = net()
    one, two = groups(model)
    optimizer = KBFGS(model, [{**one, "lr": lambda k: 0.1}, {**two, "lr": lambda k: 0.1 if k < 3 else 0.05}])
    for _ in range(2):
        step(model, optimizer)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["param_groups"])
    for _ in range(2):
        with pytest.raises(ValueError, match="have the lr 0.1 and 0.05"):
            step(model, optimizer)
        assert same(model, before) and optimizer.state_dict()["param_groups"] == state


# ------------------------------------------------------------------ what follows


@pytest.mark.parametrize("name", rows(lambda member: member.takes("weight_decay")))
def test_equal_decays_make_the_steps_of_one_group(name: str) -> None:
    model, twin = net(), net()
    two = FAMILY[name].make(model, params=groups(model, weight_decay=0.1), lr=0.1, T=2)
    one = FAMILY[name].make(twin, params=[p for g in groups(twin) for p in g["params"]], lr=0.1, T=2, weight_decay=0.1)
    for _ in range(4):
        assert torch.equal(step(model, two), step(twin, one))
    assert same(model, twin)


def test_the_table_says_whose_decay_a_bias_has() -> None:
    model = net()
    lines = {line.split()[0]: line for line in repr(KBFGS(model, groups(model))).splitlines()}
    assert "last column of its layer's W, with the weight decay of group 1" in lines["0.bias"]
    assert "group" not in repr(KBFGS(model)).split("0.bias")[1].splitlines()[0]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("steps", [0, 3])
def test_biases_that_are_added_later(name: str, steps: int) -> None:
    """Before the first step that makes no difference; later they leave what they kept, and join their layers."""
    model, twin = net(), net()
    first, second = groups(model)
    optimizer = FAMILY[name].make(model, params=[first], lr=0.05, T=2)
    assert all("Kronecker" not in line for line in repr(optimizer).splitlines() if ".bias" in line)
    before = model[0].bias.detach().clone()
    for _ in range(steps):
        step(model, optimizer)
    assert torch.equal(model[0].bias, before)
    optimizer.add_param_group(second)
    if steps == 0:
        whole = FAMILY[name].make(twin, params=groups(twin), lr=0.05, T=2)
        for _ in range(4):
            assert torch.equal(step(model, optimizer), step(twin, whole))
        assert same(model, twin)
    step(model, optimizer)
    assert not torch.equal(model[0].bias, before)
    with pytest.raises(ValueError, match="Weight and bias of new .* have the momentum"):
        model.add_module("new", nn.Linear(3, 3))
        optimizer.add_param_group({"params": [model.new.weight]})
        optimizer.add_param_group({"params": [model.new.bias], "momentum": 0.11})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": [model.new.bias]})
    step(model, optimizer)


def test_weights_that_are_added_later_take_their_biases_along() -> None:
    """What a bias kept while it stood alone is forgotten: its momentum is a column of its layer's now."""
    model = net()
    matrices, vectors = groups(model)
    optimizer = KBFGS(model, [{"params": [*vectors["params"], model[3].weight]}], lr=0.05)
    assert "the weight of its layer is not optimized" in repr(optimizer)
    for _ in range(2):
        step(model, optimizer)
    assert optimizer.state[model[0].bias].keys() == {"momentum", "exp_avg_sq", "weights"}
    optimizer.add_param_group({"params": [model[0].weight]})
    before = model[0].bias.detach().clone()
    step(model, optimizer)
    assert not optimizer.state.get(model[0].bias) and not torch.equal(before, model[0].bias)


@pytest.mark.parametrize("name", rows(lambda member: member.takes("weight_decay")))
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_layer_that_is_half_frozen(name: str, frozen: str) -> None:
    """Each part that moves has its own group's decay, also where the layer has no curvature."""
    decayed, plain = net(), net()
    for model, decay in ((decayed, 0.5), (plain, 0.0)):
        getattr(model[3], frozen).requires_grad_(False)
        nn.init.ones_(model[3].bias)
        optimizer = FAMILY[name].make(model, params=groups(model, weight_decay=decay), lr=1e-3)
        start = copy.deepcopy(model[3])
        with pytest.warns(UserWarning, match="Layer 3") if frozen == "weight" else torch.enable_grad():
            step(model, optimizer)
        assert torch.equal(getattr(model[3], frozen), getattr(start, frozen))
    if frozen == "weight":
        torch.testing.assert_close(plain[3].bias - decayed[3].bias, torch.full((3,), 1e-3 * 0.5), rtol=1e-2, atol=0)
    else:
        assert torch.equal(decayed[3].weight, plain[3].weight)


def test_the_groups_of_a_trainer_of_hugging_face(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=20, dim=8, hidden_dim=16, n_heads=2, n_layers=1)
    model = transformers.DistilBertForSequenceClassification(config).eval()
    arguments = transformers.TrainingArguments(str(tmp_path), weight_decay=0.1, use_cpu=True, report_to="none")
    trainer = transformers.Trainer(model, arguments)
    built = trainer.create_optimizer()
    theirs = [{key: g[key] for key in ("params", "weight_decay")} for g in built.param_groups]
    assert [g["weight_decay"] for g in theirs] == [0.1, 0.0]
    optimizer = OnePassKBFGS(model, theirs)
    words, losses = torch.arange(16).reshape(4, 4), []
    for _ in range(8):
        loss = model(input_ids=words, labels=torch.arange(4) % 2).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0] and "weight decay of group 1" in repr(optimizer)
