"""Of the passes inside ``first_pass()`` and ``second_pass()``, those count that add to ``.grad``, or would."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import KBFGS, Minibatch
from tests.cases import assert_close
from tests.optim.family import FAMILY, ONE_PER_CLASS, rows
from tests.optim.plain_loop import Interlude, backward, batch, left, net, nothing
from tests.optim.test_resume import assert_identical
from tests.optim.test_what_counts import (
    ASIDE,
    adversarial_input,
    evaluation,
    forward_only,
    gradient_of_the_input,
    penalty,
)


def trained(
    name: str,
    before: Interlude = nothing,
    passes: Interlude = backward,
    after: Interlude = nothing,
    in_second: bool = False,
) -> Any:
    """What three steps leave, with interludes in their first passes or, as closures have them, in both."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)

    def second(k: int) -> None:
        if not optimizer.second_pass_due:
            return
        minibatch = Minibatch(model, F.cross_entropy, *batch(k))
        sampled = optimizer.recipe.second_pass.sampled
        with optimizer.second_pass():
            interludes = [before(model, optimizer, *batch(k))] if in_second else []
            if sampled:
                minibatch.sampled(k)
            else:
                (passes if in_second else backward)(model, optimizer, *batch(k))
            interludes += [after(model, optimizer, *batch(k))] if in_second else []

    for k in range(3):
        optimizer.zero_grad()
        with optimizer.first_pass():
            interludes = [before(model, optimizer, *batch(k))]
            passes(model, optimizer, *batch(k))
            interludes.append(after(model, optimizer, *batch(k)))
        if optimizer.recipe.second_pass.is_before_step:
            second(k)
        optimizer.step()
        second(k)
    return left(model, optimizer)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("aside", ASIDE)
@pytest.mark.parametrize("name", ["KBFGS", "OnePassKBFGS"])
def test_a_pass_aside_changes_nothing(name: str, aside: Any, place: str) -> None:
    assert_identical(trained(name, **{place: aside}), trained(name))


def returned_first(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """As GradNorm and logs of gradients do, through the graph of the loss itself."""
    loss = F.cross_entropy(model(x), y)
    torch.autograd.grad(3 * loss, list(model.parameters()), retain_graph=True)
    torch.autograd.grad(loss, model[0].weight, retain_graph=True)
    loss.backward()


def of_one_layer(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(F.cross_entropy(model(2 * x), y), model[6].weight)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.filterwarnings("ignore:Layer .* has a gradient but was not measured")  # KFAC as printed, at first
def test_gradients_that_are_returned_are_no_data(name: str) -> None:
    want = trained(name)
    assert_identical(trained(name, passes=returned_first), want)
    assert_identical(trained(name, before=of_one_layer), want)


# ------------------------------------------------------------------ in both passes, of which one has frozen weights

QUIET = pytest.mark.filterwarnings("ignore:Layer .* has a gradient but was not measured")  # KFAC as printed, at first


def features_first(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """As methods for several losses do, through the graph of the loss itself: gradients by what the heads share."""
    features = model[:5](x)
    loss = F.cross_entropy(model[5:](features), y)
    torch.autograd.grad(3 * loss, features, retain_graph=True)
    loss.backward()


@QUIET
@pytest.mark.parametrize("name", rows(lambda member: not member.samples))  # those sample in a pass of their own
def test_gradients_by_features_are_no_data(name: str) -> None:
    assert_identical(trained(name, passes=features_first, in_second=True), trained(name))


WITHOUT_WEIGHTS = [forward_only, evaluation, gradient_of_the_input, penalty, adversarial_input]


@QUIET
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("aside", WITHOUT_WEIGHTS)
@pytest.mark.parametrize("name", [name for name in ONE_PER_CLASS if FAMILY[name].passes == 2])
def test_a_pass_aside_in_both_passes_changes_nothing(name: str, aside: Any, place: str) -> None:
    assert_identical(trained(name, in_second=True, **{place: aside}), trained(name))


@pytest.mark.parametrize("order", [1, -1])
def test_passes_of_inputs_that_need_a_gradient_count_beside_others(order: int) -> None:
    """Two that add up: of data, and of data with a gradient of their own."""

    def passes(needs_grad: bool, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        parts = [(x[:6], y[:6]), (x[6:].clone().requires_grad_(needs_grad), y[6:])]
        for part, targets in parts[::order]:
            (F.cross_entropy(model(part), targets) / 2).backward()

    want, got = (trained("KBFGS", passes=partial(passes, needs), in_second=True) for needs in (False, True))
    assert_identical(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_through_checkpoints_count(reentrant: bool) -> None:
    def passes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        h = checkpoint(model[2:5], model[:2](x), use_reentrant=reentrant)
        torch.autograd.grad(F.cross_entropy(model(z := x.clone().requires_grad_()), y), z)
        F.cross_entropy(model[5:](h), y).backward()

    assert_identical(trained("KBFGS", passes=passes, in_second=True), trained("KBFGS"))


@pytest.mark.parametrize("name", ["KFAC", "KBFGS, untuned"])
def test_of_the_passes_of_a_warm_start_those_count_too(name: str) -> None:
    found = []
    for passes in (backward, features_first):
        model = net()
        optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
        optimizer.warm_start([batch(0)], lambda one: passes(model, optimizer, *one), progress=False)  # noqa: B023
        found.append(left(model, optimizer))
    assert_identical(*found)


# ------------------------------------------------------------------ asked for by a user


def test_gradients_that_are_returned_are_measured_where_a_user_asks_for_it() -> None:
    """Alone, and beside an optimizer's first pass."""
    model = net()
    optimizer = KBFGS(model)
    x, y = batch(0)
    moments = KBFGSQuantities()
    with backpack(moments):
        torch.autograd.grad(F.cross_entropy(model(x), y), model[6].weight)
    alone = moments[model[6]]
    with backpack(moments), optimizer.first_pass():
        torch.autograd.grad(F.cross_entropy(model(2 * x), y), model[6].weight)
        backward(model, optimizer, *batch(1))
        moments.clear()
        torch.autograd.grad(F.cross_entropy(model(x), y), model[6].weight)
    assert torch.equal(moments[model[6]].dh_bar, alone.dh_bar) and alone.num_data == 12
    assert_close(12 * alone.dh_bar, 12 * torch.autograd.grad(F.cross_entropy(model(x), y), model[6].bias)[0], 1e-12)


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_pass_that_adds_nothing_is_no_first_pass(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    with pytest.raises(RuntimeError, match=r"No gradient changed .* loss.backward\(\)"), optimizer.first_pass():
        torch.autograd.grad(F.cross_entropy(model(batch(0)[0]), batch(0)[1]), list(model.parameters()))
