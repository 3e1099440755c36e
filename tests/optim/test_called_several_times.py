"""A layer that is called several times in a pass is looked at as one batch: A along H_A ā, with ā the mean of all."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.extensions import FisherProducts, InputQuantities, base
from kfqn_ext.optim import OnePassKBFGS
from kfqn_ext.optim.inverses import MovingHessianAction
from kfqn_ext.optim.preconditioner.preconditioner import Preconditioner
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY, rows
from tests.optim.plain_loop import batch, left
from tests.optim.test_resume import assert_identical
from tests.optim.twins import combinations, unit

# Rows that look at A in a direction; others keep a moving average of A, which they multiply with.
PROBING = rows(lambda member: member.action_A and not isinstance(member.recipe.input_inverse, MovingHessianAction))


class Net(nn.Module):
    """Layers called three times, twice with different numbers of data and locations, and once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.body, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(50, 50), nn.Linear(50, 3)
        self.calls = 3

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.conv(x).tanh()).flatten(1) + 0.1 * self.conv(x[:5, :, 1:]).mean()
        for _ in range(self.calls):
            h = self.body(h).tanh()
        return self.head(h)


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


Step = Callable[[Any, nn.Module, Tensor, Tensor], None]


def closure(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def phases(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    with optimizer.first_pass():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if optimizer.second_pass_due:
        with optimizer.second_pass():
            F.cross_entropy(model(x), y).backward()


def plain(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


FORMS = {
    **{f"{name}, closure": (name, closure) for name in PROBING},
    "KBFGS, phases": ("KBFGS", phases),
    "KBFGS, untuned, phases": ("KBFGS, untuned", phases),
    "OnePassKBFGS, phases": ("OnePassKBFGS", phases),
    "OnePassKBFGS, plain": ("OnePassKBFGS", plain),
}


class Watched:
    """What layers are given to learn from, and the same by dense matrices of what they multiplied in the first pass."""

    def __init__(self, model: Any, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.optimizer = model, optimizer
        self.patches: dict[nn.Module, list[Tensor]] = defaultdict(list)
        self.checked = 0
        self.before: dict[nn.Module, Any] = {}
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for layer in self.layers:
            layer.register_forward_hook(self.note)
        learn = Preconditioner.learn

        def checked(preconditioner: Any, due: Any, first: Any, *args: Any) -> None:
            for block in due:
                self.check(block.layer.module, block.state, first[block.layer.module])
            learn(preconditioner, due, first, *args)

        monkeypatch.setattr(Preconditioner, "learn", checked)

    def begin(self) -> None:
        self.patches.clear()
        self.before = {layer: copy.deepcopy(self.optimizer.state[layer.weight]) for layer in self.layers}
        self.k = self.optimizer.param_groups[0]["step"] + 1
        self.started = {layer for layer in self.layers if "num_locations" in self.optimizer.state[layer.weight]}

    def note(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls = {self.model.conv: 3, self.model.body: self.model.calls, self.model.head: 1}
        if len(self.patches[module]) < calls[module]:  # the second pass is another's
            self.patches[module].append(ref.patches(module, args[0].detach()))

    def check(self, module: Any, state: Any, measured: Any) -> None:
        if module not in self.started:  # A was formed
            return
        rows = torch.cat([a.flatten(0, 1) for a in self.patches[module]])
        a_bar, A = rows.mean(0), rows.T @ rows / sum(map(len, self.patches[module]))
        rule, q = self.optimizer.recipe.input_inverse, measured[InputQuantities]
        assert_close(q.a_bar, a_bar, 1e-12)
        v = a_bar.unsqueeze(-1)
        if q.kept is not None:
            before = self.before[module]
            random = map(unit, combinations(before["momentum"].mT, self.k))
            v = torch.cat((v, before["u"].unsqueeze(-1), *random), dim=-1)
            assert_close(q.kept, v, 1e-12)
        s = rule.precondition(state, v.mT).mT.view_as(q.s)
        assert_close(q.s, s, 1e-10)
        assert_close(q.A_s, A @ s, 1e-10)
        assert q.operator is None  # inputs were let go
        self.checked += 1


@pytest.mark.parametrize("form", FORMS)
def test_the_direction_is_that_of_all_calls(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, step = FORMS[form]
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    watched = Watched(model, optimizer, monkeypatch)
    for k in range(5):
        watched.begin()
        step(optimizer, model, *batch(k))
    assert watched.checked == 3 * 4


def test_directions_of_outputs_are_those_of_the_state_whatever_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with Γ do not wait for an input: one set of directions serves all calls."""
    model, chosen = net(), []
    optimizer = OnePassKBFGS(model)
    plain(optimizer, model, *batch(0))
    probe = type(optimizer)._probe_G
    monkeypatch.setattr(type(optimizer), "_probe_G", lambda self, module: chosen.append(module) or probe(self, module))
    learn = Preconditioner.learn
    products = []

    def noted(preconditioner: Any, due: Any, first: Any, *args: Any) -> None:
        products.extend(first[block.layer.module][FisherProducts] for block in due)
        learn(preconditioner, due, first, *args)

    monkeypatch.setattr(Preconditioner, "learn", noted)
    gradients = defaultdict(list)
    for layer in (model.conv, model.body, model.head):
        layer.register_forward_hook(
            lambda m, a, out: out.register_hook(lambda g: gradients[m].append(ref.outputs(m, g))) and None
        )
    plain(optimizer, model, *batch(1))
    assert sorted(map(id, chosen)) == sorted(map(id, (model.conv, model.body, model.head)))
    for module, q in zip((model.conv, model.body, model.head), products, strict=True):
        N = sum(map(len, gradients[module]))
        g = N * torch.cat([part.flatten(0, 1) for part in gradients[module]])
        assert_close(q.Gamma_s, g.T @ (g @ q.s) / len(g), 1e-10)


# ------------------------------------------------------------------ what it costs


def held(x: Tensor) -> Callable[[], bool]:
    """Whether a tensor's memory is alive."""
    memory = x.untyped_storage()._weak_ref()
    return lambda: not torch.UntypedStorage._expired(memory)


def inputs_held(optimizer: Any, model: Any, k: int, announced: bool) -> dict[nn.Module, list[bool]]:
    """Which inputs of each layer are alive when the backward pass is over, but not its step."""
    found: dict[nn.Module, list[Callable[[], bool]]] = defaultdict(list)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [m.register_forward_pre_hook(lambda m, args: found[m].append(held(args[0]))) for m in layers]
    x, y = batch(k)
    if announced:
        with optimizer.first_pass():
            F.cross_entropy(model(x.clone()), y).backward()
            alive = {m: [ask() for ask in asks] for m, asks in found.items()}
        assert not any(ask() for asks in found.values() for ask in asks)
    else:
        F.cross_entropy(model(x.clone()), y).backward()
        alive = {m: [ask() for ask in asks] for m, asks in found.items()}
    for hook in hooks:
        hook.remove()
    optimizer.step()
    assert not any(ask() for asks in found.values() for ask in asks)
    optimizer.zero_grad()
    return alive


@pytest.mark.parametrize(("name", "announced"), [("KBFGS", True), ("OnePassKBFGS", True), ("OnePassKBFGS", False)])
@pytest.mark.filterwarnings("ignore:A second pass was due and never ran")
def test_inputs_are_held_of_layers_that_are_called_several_times_alone(
    name: str, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of none in the very first pass, which forms A, nor of any beyond the pass, or the step."""
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)  # calls of fewer wait for others, in that pass too
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    assert not any(sum(inputs_held(optimizer, model, 0, announced).values(), []))
    for k in range(1, 3):
        alive = inputs_held(optimizer, model, k, announced)
        assert alive[model.body] == [True] * 3 and all(alive[model.conv]) and alive[model.head] == [False]


@pytest.mark.parametrize("announced", [True, False])
def test_until_it_is_known_inputs_of_all_layers_are_held(announced: bool) -> None:
    """In the first pass of an optimizer that has loaded its curvature."""
    model, other = net(), net()
    trained, resumed = OnePassKBFGS(model), OnePassKBFGS(other)
    plain(trained, model, *batch(0))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(trained.state_dict())
    assert inputs_held(resumed, other, 1, announced)[other.head] == [True]
    assert inputs_held(resumed, other, 2, announced)[other.head] == [False]


# ------------------------------------------------------------------ what is known, and what is not


@pytest.mark.parametrize("name", rows(lambda member: member.action_A))
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    """Though it has to find out anew which layers are called several times."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    for k in range(3):
        closure(optimizer, model, *batch(k))
    other = net()
    resumed = FAMILY[name].make(other, lr=0.05, damping=0.5)
    saved = left(model, optimizer)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for one, its in ((model, optimizer), (other, resumed)):
        torch.manual_seed(1)
        for k in range(3, 6):
            closure(its, one, *batch(k))
    assert_identical(left(other, resumed), left(model, optimizer))


def test_a_layer_that_is_called_once_more_than_ever_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first such pass has looked along the first call's ā when it learns of the others; A s is that of all."""
    model = net()
    model.calls = 1
    optimizer = OnePassKBFGS(model)
    for k in range(2):
        plain(optimizer, model, *batch(k))
    model.calls = 3
    products = []
    learn = Preconditioner.learn

    def noted(preconditioner: Any, due: Any, first: Any, *args: Any) -> None:
        products.append(first[model.body][InputQuantities])
        learn(preconditioner, due, first, *args)

    inputs: list[Tensor] = []
    hook = model.body.register_forward_hook(lambda m, args, out: inputs.append(ref.patches(m, args[0].detach())))
    with monkeypatch.context() as patched:
        patched.setattr(Preconditioner, "learn", noted)
        plain(optimizer, model, *batch(2))
    hook.remove()
    rows = torch.cat(inputs).flatten(0, 1)
    assert_close(products[0].A_s, rows.T @ (rows @ products[0].s) / len(rows), 1e-10)
    watched = Watched(model, optimizer, monkeypatch)
    watched.begin()
    plain(optimizer, model, *batch(3))
    assert watched.checked == 3


@pytest.mark.parametrize("announced", [True, False])
def test_micro_batches_are_no_calls(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are called once in each of several passes are probed at once, and nothing is held."""
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)  # calls of fewer wait for others, until it is known

    class Once(nn.Sequential):
        pass

    torch.manual_seed(0)
    model: Any = Once(nn.Flatten(), nn.Linear(50, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = OnePassKBFGS(model)
    for k in range(3):
        x, y = batch(k)
        asks = []

        def passes(x: Tensor = x, y: Tensor = y, asks: Any = asks) -> None:
            for part in (slice(0, 5), slice(5, 12)):
                micro = x[part].clone()
                asks.append(held(micro))
                (F.cross_entropy(model(micro), y[part], reduction="sum") / 12).backward()
                del micro
                assert not any(ask() for ask in asks)

        if announced:
            with optimizer.first_pass():
                passes()
        else:
            passes()
        optimizer.step()
        optimizer.zero_grad()
