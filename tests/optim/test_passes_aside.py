"""Of the passes inside ``first_pass()``, those count that add to ``.grad``: for every row of the table."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import KBFGS, Minibatch
from tests.cases import assert_close
from tests.optim.family import FAMILY, ONE_PER_CLASS
from tests.optim.plain_loop import Interlude, backward, batch, left, net, nothing
from tests.optim.test_resume import assert_identical
from tests.optim.test_what_counts import ASIDE


def trained(name: str, before: Interlude = nothing, passes: Interlude = backward, after: Interlude = nothing) -> Any:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    for k in range(3):
        x, y = batch(k)

        def second(model: nn.Module = model, optimizer: Any = optimizer, k: int = k) -> None:
            if optimizer.second_pass_due:
                minibatch = Minibatch(model, F.cross_entropy, *batch(k))
                with optimizer.second_pass():
                    minibatch.sampled(k) if optimizer.recipe.second_pass.sampled else minibatch.loss().backward()

        optimizer.zero_grad()
        with optimizer.first_pass():
            interludes = [before(model, optimizer, *batch(k))]
            passes(model, optimizer, x, y)
            interludes.append(after(model, optimizer, *batch(k)))
        if optimizer.recipe.second_pass.is_before_step:
            second()
        optimizer.step()
        second()
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
