"""Of passes that nobody announces, an optimizer learns from those that its gradients come from, and from no other."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import FisherProducts, InputQuantities, KFACFactors, base
from kfqn_ext.optim import OnePassKBFGS
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.plain_loop import backward, batch, close, left, net, train, trained
from tests.optim.test_resume import assert_identical
from tests.optim.twins import combinations, fisher_directions, fisher_updates, unit
from tests.real.watch import layers

# ------------------------------------------------------------------ passes that do not count


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of other data than the loop's."""
    return F.cross_entropy(model(2 * x.flip(0)), y)


def forward_only(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss that is kept, with its graph."""
    return loss_of(model, x, y)


def evaluation(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, x, y)
    model.train()


def gradients_returned(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))


def gradient_of_the_input(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss_of(model, x.requires_grad_(), y), x)


def penalty(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(loss_of(model, x.requires_grad_(), y), x, create_graph=True)
    return g.square().sum()


def gradients_of_a_penalty(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(penalty(model, optimizer, x, y), list(model.parameters()), allow_unused=True)


def adversarial_input(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x.requires_grad_(), y).backward(inputs=[x])


def frozen_model(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    model.requires_grad_(False)
    loss_of(model, x.requires_grad_(), y).backward()
    model.requires_grad_(True)


def another_model(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A copy of this one, with its hooks."""
    loss_of(copy.deepcopy(model), x, y).backward()


def function_of_the_parameters(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


ASIDE = [
    forward_only,
    evaluation,
    gradients_returned,
    gradient_of_the_input,
    penalty,
    gradients_of_a_penalty,
    adversarial_input,
    frozen_model,
    another_model,
    function_of_the_parameters,
]


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("aside", ASIDE)
def test_a_pass_aside_changes_nothing(aside: Any, place: str) -> None:
    """Before the pass that counts, and between it and the step."""
    assert_identical(trained(**{place: aside}), trained())


CLEARED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "p.grad = zeros": lambda model, optimizer: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
}


@pytest.mark.parametrize("how", CLEARED)
def test_a_pass_whose_gradients_were_cleared_changes_nothing(how: str) -> None:
    def cleared(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        CLEARED[how](model, optimizer)

    assert_identical(trained(before=cleared), trained())


def test_a_gradient_that_is_written_to_between_micro_batches_was_not_cleared() -> None:
    """As clipping does, here by a norm that leaves it as it is."""

    def in_parts(clip: bool) -> Callable[..., None]:
        def passes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
            for part in range(3):
                (F.cross_entropy(model(x[part::3]), y[part::3]) / 3).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e6)

        return passes

    found = []
    for clip in (False, True):
        model = net()
        optimizer = OnePassKBFGS(model)
        train(model, optimizer, passes=in_parts(clip))
        found.append(left(model, optimizer))
    assert_identical(*found)


class TwoHeads(nn.Module):
    """One trunk; a pass reaches one of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(50, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x.flatten(1)).tanh())


def two_heads(before: Callable[..., Any]) -> dict[str, Any]:
    """A step of both heads, then two of the first alone."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = OnePassKBFGS(model)
    for k in range(3):
        x, y = batch(k)
        before(model, x, y)
        for head in (0, 1) if k == 0 else (0,):
            F.cross_entropy(model(x, head), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


def test_a_cleared_pass_teaches_a_layer_nothing_that_the_next_pass_does_not_reach() -> None:
    def cleared(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(2 * x, 1), y).backward()
        model.zero_grad()

    assert_identical(two_heads(cleared), two_heads(lambda *_: None))


def test_a_step_that_failed_leaves_nothing_for_the_next() -> None:
    def failed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="No parameter has a gradient"):
            optimizer.step()

    assert_identical(trained(before=failed), trained())


@pytest.mark.parametrize("announce", [True, False])
def test_a_pass_is_measured_once(announce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is announced; and what runs between that and the step is not."""
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)  # what is small is measured when the pass has ended
    measured, measure = [], FisherProducts.measure
    monkeypatch.setattr(FisherProducts, "measure", lambda *args: measured.append(args[1]) or measure(*args))
    model = net()
    optimizer = OnePassKBFGS(model)
    with optimizer.first_pass() if announce else nullcontext():
        backward(model, optimizer, *batch(0))
    if announce:
        backward(model, optimizer, *batch(1))
    assert measured == [model[6], model[3], model[0]]
    optimizer.step()


def test_a_warm_start_is_no_pass_of_a_step() -> None:
    """Its curvature in the state is all that it leaves."""
    data = [batch(k) for k in (7, 8)]
    models = net(), net()
    warm, cold = (OnePassKBFGS(model) for model in models)

    def forward(one: Any) -> None:
        F.cross_entropy(models[0](one[0]), one[1]).backward()

    warm.warm_start(data, forward, progress=False)
    assert all(p.grad is None for p in models[0].parameters())
    cold.load_state_dict(copy.deepcopy(warm.state_dict()))
    for model, optimizer in zip(models, (warm, cold), strict=True):
        train(model, optimizer)
    assert_identical(left(models[0], warm), left(models[1], cold))


# ------------------------------------------------------------------ passes that count


class Taught:
    """What layers are to learn from passes: by dense factors, and one direction each in which A is looked at."""

    def __init__(self, model: nn.Module, optimizer: Any, late: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.before = {name: dict(optimizer.state[m.weight]) for name, m in layers(model).items()}
        self.before = copy.deepcopy(self.before)
        self.factors, self.inputs = KFACFactors(accumulate=True), InputQuantities(probe=self.probe, accumulate=True)
        self.inputs.late = lambda module: late  # the direction is that of all calls, not of the first

    def probe(self, module: nn.Module, a_bar: Tensor) -> tuple[Tensor, Tensor]:
        (name,) = [name for name, m in layers(self.model).items() if m is module]
        st = self.before[name]
        random = map(unit, combinations(st["momentum"].mT, 2))
        V = torch.cat((a_bar.unsqueeze(-1), st["u"].unsqueeze(-1), *random), dim=-1)
        return st["H_A"] @ V, V

    def check(self, factors: Any = None) -> None:
        """After the step; the factors are those of another model where given."""
        self.inputs.finish()
        epsilon = self.optimizer.param_groups[0]["damping"]
        for name, module in layers(self.model).items():
            st, got = self.before[name], self.optimizer.state[module.weight]
            q, f = self.inputs[module], self.factors[module] if factors is None else factors[name]
            trace_A = f.Omega.diagonal(dim1=-2, dim2=-1).mean(-1)
            lambda_A = epsilon * (0.9 * st["trace_A"] + 0.1 * trace_A)[..., None]
            H_A = st["H_A"]
            for s, v in zip(q.s.unbind(-1), q.kept.unbind(-1), strict=True):
                y = torch.einsum("...ij,...j->...i", f.Omega, s) + lambda_A * s
                H_A = ref.bfgs(H_A, s, 0.75 * v + 0.25 * y)
            pairs = fisher_directions(st["momentum"], st["H_A"], st["H_G"], st["u"], 2)
            assert_close(got["H_A"], H_A, 1e-8)  # five updates in a row
            assert_close(got["H_G"], fisher_updates(st["H_G"], pairs, f.Gamma, epsilon), 1e-8)  # four updates in a row
            assert (got["H_G"] - st["H_G"]).abs().max() > 1e-4 and (got["H_A"] - st["H_A"]).abs().max() > 1e-4


def second_step(model: Any, passes: Callable[[Any], Any], late: bool = False) -> tuple[dict[str, Any], Taught]:
    """What the second step leaves, and what it was to learn; the passes of the first are one plain pass."""
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, range(1))
    taught = Taught(model, optimizer, late)
    with backpack(taught.factors, taught.inputs):
        passes(model)
    optimizer.step()
    return left(model, optimizer), taught


def whole(model: nn.Module) -> None:
    F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()


def in_parts(model: nn.Module) -> None:
    """Of unequal sizes, their losses scaled to shares of the whole."""
    x, y = batch(1)
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        (F.cross_entropy(model(x[part]), y[part], reduction="sum") / 12).backward()


def test_micro_batches_teach_what_the_big_batch_does() -> None:
    """But for the one direction in which A is looked at: its ā is the first micro-batch's."""
    big, of_big = second_step(net(), whole)
    parts, of_parts = second_step(net(), in_parts)
    factors = {name: of_big.factors[m] for name, m in layers(of_big.model).items()}
    of_big.check()
    of_parts.check(factors)
    for found in (big, parts):
        for state in found["optimizer"]["state"].values():
            for key in ("H_A", "leverage"):
                state.pop(key, None)
    close(parts, big)


def test_micro_batches_of_a_first_step_equal_the_big_batch() -> None:
    """There A is formed, and its direction is that of all."""
    found = []
    for passes in (whole, in_parts):
        model = net()
        optimizer = OnePassKBFGS(model)
        passes(model)
        optimizer.step()
        found.append(left(model, optimizer))
    close(*found)


def losses(model: nn.Module) -> list[Tensor]:
    """Of two forward passes."""
    x, y = batch(1)
    return [model(x[:7].flip(0)).square().mean(), F.cross_entropy(model(x), y)]


def test_two_losses_teach_what_their_sum_does() -> None:
    one, of_one = second_step(net(), lambda model: [loss.backward() for loss in reversed(losses(model))])
    both, of_both = second_step(net(), lambda model: sum(losses(model)).backward())
    of_one.check()
    of_both.check()
    close(one, both)


def test_two_losses_of_one_forward_pass_teach_what_the_first_does() -> None:
    """Γ of their sum does not follow from theirs; where a pass is announced, that is an error."""
    model = net()
    optimizer = OnePassKBFGS(model)
    output = model(batch(0)[0])
    output.square().mean().backward(retain_graph=True)
    heard = optimizer._passes.listening.measurement(pytest.fail).quantities()
    output.sin().mean().backward()
    after = optimizer._passes.listening.measurement(pytest.fail).quantities()
    assert heard and all(after[module][kind] is q for module, of in heard.items() for kind, q in of.items())
    optimizer.step()
    with pytest.raises(NotImplementedError, match="add the losses up and call backward"), optimizer.first_pass():
        output = model(batch(1)[0])
        output.square().mean().backward(retain_graph=True)
        output.sin().mean().backward()


class Twice(nn.Module):
    """A layer that is called twice, and one that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(50, 50), nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x.flatten(1)).tanh()).tanh())


def test_calls_of_a_layer_count_as_one_batch() -> None:
    torch.manual_seed(0)
    _, taught = second_step(Twice().double(), whole, late=True)
    taught.check()
    assert taught.factors[taught.model.first].num_data == 24


class Checkpointed(nn.Module):
    """The body of the other network, computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[:2](x)
        return self.body[5:](checkpoint(self.body[2:5], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_nothing(reentrant: bool) -> None:
    model: Any = Checkpointed(reentrant)
    found, taught = second_step(model, whole)
    want, _ = second_step(net(), whole)
    taught.check()
    assert_identical([*found["model"].values()], [*want["model"].values()])
    assert_identical(found["optimizer"]["state"], want["optimizer"]["state"])


def test_a_graph_that_is_retained_changes_nothing() -> None:
    kept = []

    def retained(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        kept.append(F.cross_entropy(model(x), y))
        kept[-1].backward(retain_graph=True)

    assert_identical(trained(passes=retained), trained())


def test_a_second_pass_through_a_graph_whose_first_was_cleared() -> None:
    def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        (2 * loss).backward(retain_graph=True)
        model.zero_grad()
        loss.backward()

    assert_identical(trained(passes=twice), trained())


def test_a_pass_with_create_graph_is_none_to_learn_from() -> None:
    """Its computation goes on; the step says so, once there is curvature, and is taken."""
    model = net()
    optimizer = OnePassKBFGS(model)
    train(model, optimizer, range(1))
    before = left(model, optimizer)["optimizer"]["state"]
    with pytest.warns(UserWarning, match="Using backward"):
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward(create_graph=True)
    with pytest.warns(UserWarning, match="without measurements"):
        optimizer.step()
    for state, old in zip(left(model, optimizer)["optimizer"]["state"].values(), before.values(), strict=True):
        for key in {"H_A", "H_G", "trace_A"} & old.keys():
            assert torch.equal(state[key], old[key])
    optimizer.zero_grad()


def test_accumulation_by_a_trainer_that_steps_with_a_closure() -> None:
    """It runs all micro-batches but the last by itself, and the last in the closure."""

    def by_closure(model: nn.Module) -> dict[str, Any]:
        optimizer = OnePassKBFGS(model)
        for k in range(3):
            x, y = batch(k)

            def closure(part: slice, x: Tensor = x, y: Tensor = y) -> Tensor:
                if part.start == 0:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x[part]), y[part]) / 2
                loss.backward()
                return loss

            closure(slice(0, 6))
            optimizer.step(lambda closure=closure: closure(slice(6, 12)))
        optimizer.zero_grad()
        return left(model, optimizer)

    def halves(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for part in (slice(0, 6), slice(6, 12)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()

    assert_identical(by_closure(net()), trained(passes=halves))
