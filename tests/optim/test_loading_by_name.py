"""Whose state is it? Names tell, where they were saved; and torch's hooks may say otherwise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, classes

X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
each = pytest.mark.parametrize("name", FAMILY)
each_class = pytest.mark.parametrize("name", classes())


class Net(nn.Module):
    """Layers of one shape: that of the state does not tell them apart."""

    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(ord(name))
            setattr(self, name, nn.Linear(5, 5))
        self.n = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.n(self.b(self.a(x).tanh()).tanh()))


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for k in range(steps):
        torch.manual_seed(k)  # of sampled targets
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


def trained(name: str, groups: Callable[[Net], Any] | None = None) -> tuple[Net, Any]:
    model = Net()
    optimizer = FAMILY[name].make(model, lr=0.05, **({} if groups is None else {"params": groups(model)}))
    train(model, optimizer)
    return model, optimizer


def goes_on(model: Net, optimizer: Any, twin: Net, other: Any) -> None:
    """As the run that was not interrupted, bit for bit."""
    twin.load_state_dict(model.state_dict())
    for one, its_model in ((optimizer, model), (other, twin)):
        train(its_model, one)
    for name, p in model.named_parameters():
        q = twin.get_parameter(name)
        assert torch.equal(p, q), name
        assert optimizer.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(value, other.state[q][key]) for key, value in optimizer.state[p].items())


def snapshot(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def unchanged(optimizer: Any, before: Any) -> bool:
    now = optimizer.state_dict()
    states = [{(i, key): value for i, s in d["state"].items() for key, value in s.items()} for d in (before, now)]
    same = states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    return same and before["param_groups"] == now["param_groups"]


# ------------------------------------------------------------------ another order


@each
def test_parameters_in_another_order(name: str) -> None:
    model, optimizer = trained(name)
    twin = Net("bca")
    other = FAMILY[name].make(twin, lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"][0] == "b.weight"
    goes_on(model, optimizer, twin, other)


def layers(order: str, named: bool = True) -> Callable[[Net], list[dict[str, Any]]]:
    """A group for each word, with a rate of its own."""

    def groups(model: Net) -> list[dict[str, Any]]:
        found = []
        for word in order.split():
            pairs = [pair for m in word for pair in getattr(model, m).named_parameters(prefix=m)]
            found.append({"params": pairs if named else [p for _, p in pairs], "lr": ord(word[0]) / 2000})
        return found

    return groups


@each_class
@pytest.mark.parametrize("order", ["ab cn", "ba nc", "cn ab", "nc ba"])
@pytest.mark.parametrize(
    "named", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["names given", "names known"]
)
def test_groups_in_another_order(name: str, order: str, named: bool) -> None:
    """Each keeps its own hyperparameters."""
    model, optimizer = trained(name, layers("ab cn"))
    twin = Net()
    other = FAMILY[name].make(twin, params=layers(order, named)(twin), lr=0.05)
    rates = [ord("a") / 2000 if "a" in word else ord("c") / 2000 for word in order.split()]
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == rates
    goes_on(model, optimizer, twin, other)


@each_class
def test_other_groups_are_refused(name: str) -> None:
    _, optimizer = trained(name, layers("ab cn"))
    twin, other = trained(name, layers("ac bn"))
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"parameters in other groups: a.bias, a.weight, c.bias and 1 more make one"):
        other.load_state_dict(optimizer.state_dict())
    assert unchanged(other, before)
    train(twin, other)


def renamed(state: Any, rename: Callable[[str], str]) -> Any:
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        group["param_names"] = [rename(name) for name in group["param_names"]]
    return state


@each_class
def test_other_names_are_refused(name: str) -> None:
    """With what is missing, what is there instead, and the ways out; which work."""
    model, optimizer = trained(name)
    twin = Net()
    other = FAMILY[name].make(twin, lr=0.05)
    state, before = renamed(optimizer.state_dict(), lambda of: f"net.{of}"), snapshot(other)
    with pytest.raises(ValueError, match=r"lacks a.bias, .* and 5 more, and it has net.a.bias.*param_names"):
        other.load_state_dict(state)
    assert unchanged(other, before)
    for group in state["param_groups"]:
        del group["param_names"]
    other.load_state_dict(state)
    goes_on(model, optimizer, twin, other)


@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_model_that_is_compiled_now_or_was_then(compiled: tuple[bool, bool], part: bool) -> None:
    """It is the same model, though torch gives it other names."""
    models, optimizers = [], []
    for is_compiled, order in zip(compiled, ("abc", "bca"), strict=True):
        model = inner = Net(order)
        if is_compiled and part:
            model.b = torch.compile(model.b, backend="eager")
        elif is_compiled:
            model = torch.compile(model, backend="eager")
        optimizers.append(KBFGS(model, lr=0.05))
        models.append(inner)
    with torch.compiler.set_stance("force_eager"):
        train(models[0], optimizers[0])
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    found = [{name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()} for model in models]
    for name, p in found[0].items():
        one, other = optimizers[0].state[p], optimizers[1].state[found[1][name]]
        assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
    names = optimizers[1].param_groups[0]["param_names"]
    assert any("_orig_mod" in name for name in names) == compiled[1]


def test_without_names_the_order_counts() -> None:
    """As in torch: nobody gave any names when the state was saved, or names that are no model's."""
    model, optimizer = trained("KBFGS", lambda model: [*model.parameters()])
    twin = Net("bca")
    in_order = [p for layer in (twin.a, twin.b, twin.c, twin.n) for p in layer.parameters()]
    other = KBFGS.as_printed(twin, in_order, lr=0.05, damping=1.0, curvature_update_freq=1)
    other.load_state_dict(optimizer.state_dict())
    goes_on(model, optimizer, twin, other)
    _, optimizer = trained("KBFGS", lambda model: [(f"mine {i}", p) for i, p in enumerate(model.parameters())])
    other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("given", [{}, {"model": {}, "optimizer": {}}, {"state": {}}])
def test_what_is_no_state(given: dict[str, Any]) -> None:
    _, optimizer = trained("KBFGS")
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"no state of an optimizer.* it has (none|model, optimizer|state)\."):
        optimizer.load_state_dict(given)
    assert unchanged(optimizer, before)


# ------------------------------------------------------------------ torch's hooks


@each_class
@pytest.mark.parametrize("how", ["returned", "in place"])
def test_a_pre_hook_maps_the_state(name: str, how: str) -> None:
    """Of a model that was wrapped: what the hook makes of it is what counts."""
    model, optimizer = trained(name)
    state = renamed(optimizer.state_dict(), lambda of: f"module.{of}")
    twin = Net("bca")
    other = FAMILY[name].make(twin, lr=0.05)

    def unwrap(_: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        new = renamed(given, lambda of: of.removeprefix("module."))
        if how == "returned":
            return new
        given.update(new)
        return None

    other.register_load_state_dict_pre_hook(unwrap)
    other.load_state_dict(state)
    goes_on(model, optimizer, twin, other)


@each_class
def test_a_pre_hook_drops_a_layer_that_has_changed(name: str) -> None:
    """A state of another shape is refused, but for a hook that leaves it out: this layer then starts afresh."""
    model, optimizer = trained(name)
    state, twin = optimizer.state_dict(), Net()
    twin.c = nn.Linear(5, 7)
    other = FAMILY[name].make(twin, lr=0.05)
    with pytest.raises(ValueError, match="another model's"):
        other.load_state_dict(state)

    def drop(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        names = given["param_groups"][0]["param_names"]
        kept = {i: entry for i, entry in given["state"].items() if not names[i].startswith("c.")}
        return {**given, "state": kept}

    other.register_load_state_dict_pre_hook(drop)
    other.load_state_dict(state)
    assert other.state[twin.a.weight] and twin.c.weight not in other.state
    train(twin, other)


def test_what_a_pre_hook_makes_is_checked() -> None:
    _, optimizer = trained("KBFGS")
    before, state = snapshot(optimizer), optimizer.state_dict()

    def spoil(_: Any, given: dict[str, Any]) -> None:
        given["state"] = {i: {key: v[..., None] for key, v in entry.items()} for i, entry in given["state"].items()}

    handle = optimizer.register_load_state_dict_pre_hook(spoil)
    with pytest.raises(ValueError, match="The state has a"):
        optimizer.load_state_dict(state)
    assert unchanged(optimizer, before)
    handle.remove()
    optimizer.load_state_dict(state)
    assert not optimizer._optimizer_load_state_dict_pre_hooks and not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("prepend", [False, True])
def test_a_post_hook_sees_the_state_as_it_is_kept(prepend: bool) -> None:
    """In float32 where parameters are bfloat16: torch alone would have cast it."""
    _, optimizer = trained("KBFGS")
    state, twin, seen = optimizer.state_dict(), Net().bfloat16(), []
    other = KBFGS.as_printed(twin, lr=0.05, damping=1.0)

    def look(loaded: Any) -> None:
        seen.extend(v.dtype for key, v in loaded.state[twin.a.weight].items() if key in ("H_A", "H_G", "momentum"))

    other.register_load_state_dict_post_hook(look, prepend=prepend)
    other.load_state_dict(state)
    assert seen == [torch.float32] * 3


@each_class
def test_hooks_of_state_dict_and_keys_of_somebody_else(name: str) -> None:
    """A hook that adds to what is saved, at the top and beside the parameters' state."""
    model, optimizer = trained(name)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))

    def mark(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "mine": 7, "state": {**state["state"], "beside": {"number": 7}}}

    optimizer.register_state_dict_post_hook(mark)
    state = optimizer.state_dict()
    assert seen == ["before"] and state["mine"] == 7
    twin = Net("cab")
    other = FAMILY[name].make(twin, lr=0.05)
    other.load_state_dict(state)
    assert other.state["beside"] == {"number": 7}
    goes_on(model, optimizer, twin, other)


def test_a_state_by_name_of_ones_own() -> None:
    """Keys need not be numbers: a hook may have put names in their place."""
    model, optimizer = trained("KBFGS")

    def by_name(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        named = {group["param_names"][i]: entry for i, entry in state["state"].items()}
        return {"state": named, "param_groups": [{**group, "params": group["param_names"]}]}

    optimizer.register_state_dict_post_hook(by_name)
    twin = Net("bca")
    other = KBFGS.as_printed(twin, lr=0.05, damping=1.0, curvature_update_freq=1)
    other.load_state_dict(optimizer.state_dict())
    goes_on(model, optimizer, twin, other)
