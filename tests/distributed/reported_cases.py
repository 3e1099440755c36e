"""What users report of training in several processes, and other cases do not have; tests/README.md has the threads."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from kfqn_ext.optim import KBFGS, KFAC, Minibatch
from tests.distributed.cases import (
    NETS,
    STEPS,
    Pair,
    by_closure,
    case,
    data,
    equal_shares,
    in_phases,
    mlp,
    reference_steps,
    same,
    scaled_loss,
    second_best,
    share,
    unequal_shares,
)


def gathered(t: Tensor) -> list[Tensor]:
    """A tensor as each rank has it."""
    others = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(others, t.contiguous())
    return others


class Routed(nn.Module):
    """A layer for those data whose first number is positive, as an expert has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        hidden, chosen = self.first(x), (x[:, 0] > 0).nonzero()[:, 0]
        if len(chosen):
            hidden = hidden.index_add(0, chosen, self.second(x[chosen]))
        return self.last(torch.tanh(hidden))


NETS["routed"] = lambda: Routed().double(), (6,)


@case("KBFGS", "KBFGS, untuned", "OnePassKBFGS", "KFAC, untuned")
def a_layer_that_one_rank_does_not_use(ranks: int, row: str) -> None:
    """No data of the first rank reach it, in any step; for the others' sake that rank answers all messages about it."""
    pair, sizes = Pair.of(row, "routed", ddp={"find_unused_parameters": True}), equal_shares(ranks)
    sampler = second_best if pair.samples else None
    for k in range(STEPS):
        x, y = data("routed", k)
        x[:, 0] = torch.arange(16).ge(sizes[0]).double() * 2 - 1
        pair.optimizer.step(Minibatch(pair.model, scaled_loss(sizes), share(x, sizes), share(y, sizes), sampler))
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, x, y, sampler))
    pair.check()


@case("KBFGS", "KBFGS, untuned", "OnePassKBFGS", "KFAC, untuned")
def unequal_shares_whose_losses_are_means(ranks: int, row: str) -> None:
    """The objective is then the mean of the ranks' means; gradient and curvature are both of that."""
    pair, sizes = Pair.of(row, "cnn"), unequal_shares(ranks)
    weights = torch.cat([torch.full((size,), 1.0 / (ranks * size), dtype=torch.float64) for size in sizes])

    def weighted(output: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(output, y, reduction="none") * weights).sum()

    sampler = second_best if pair.samples else None
    for k in range(STEPS):
        x, y = data("cnn", k)
        pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, share(x, sizes), share(y, sizes), sampler))
        pair.reference.step(Minibatch(pair.twin, weighted, x, y, sampler))
    pair.check()


def alike() -> nn.Module:
    """Layers that only their names tell apart: messages in another order would be summed without a word."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(6)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(6, 3)).double()


NETS["alike"] = alike, (6,)


@case("KBFGS", "OnePassKBFGS", "KFAC, untuned")
def layers_that_are_alike(ranks: int, row: str) -> None:
    pair = Pair.of(row, "alike")
    by_closure(pair, "alike", equal_shares(ranks))
    pair.check()


@case("KBFGS", "KBFGS, untuned")
def layers_that_are_alike_and_divided(ranks: int, row: str) -> None:
    pair = Pair.of(row, "alike", shard_state=True)
    by_closure(pair, "alike", equal_shares(ranks))
    for p, twin in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        same(p, twin)


@case("KBFGS", "KBFGS, untuned")
def a_scaler_that_skips(ranks: int, row: str) -> None:
    """One rank's gradient overflows: all leave the step out, halve the scale, and go on as one process."""
    pair, sizes = Pair.of(row, "mlp"), equal_shares(ranks)
    mine, its = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))

    def step(model: Any, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with optimizer.first_pass(loss_scale=scaler.get_scale()):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if optimizer.second_pass_due:
            with optimizer.second_pass(loss_scale=scale):
                (F.cross_entropy(model(x), y) * scale).backward()

    for k in range(STEPS):
        x, y = data("mlp", k)
        if k == 4:
            x[-1, 0] = float("inf")  # of the last rank
        step(pair.model, pair.optimizer, mine, share(x, sizes), share(y, sizes))
        step(pair.twin, pair.reference, its, x, y)
    assert mine.get_scale() == its.get_scale() == 2.0
    pair.check()


@case()
def sampled_targets_differ_by_rank(ranks: int) -> None:
    """With one seed and the same data everywhere, each rank draws its own; dropout and the like are the user's."""
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = KFAC.as_printed(model, lr=0.1, damping=0.5)
    drawn: list[Tensor] = []

    def sample(output: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        drawn.append(torch.multinomial(output.softmax(1), 1, generator=generator)[:, 0])
        return drawn[-1]

    x, y = data("mlp", 0)
    optimizer.step(Minibatch(model, F.cross_entropy, x, y, sample))
    of_ranks = gathered(drawn[0])
    assert all(not torch.equal(of_ranks[i], of_ranks[j]) for i in range(ranks) for j in range(i))
    numbers = gathered(torch.rand(4))
    assert all(torch.equal(numbers[0], other) for other in numbers)


@case("KBFGS", "OnePassKBFGS")
def micro_batches_of_the_inner_module(ranks: int, row: str) -> None:
    """A second pass whose wrapper the optimizer does not know, and ``no_sync`` after it, as trainers have it."""
    pair = Pair.of(row, "cnn", "group")
    in_phases(pair, "cnn", equal_shares(ranks), micro=4)
    reference_steps(pair, "cnn")
    pair.check()


@case()
def a_whole_step_under_no_sync(ranks: int) -> None:
    """As without a wrapper: an error on all ranks, before anything has moved."""
    pair, sizes = Pair.of("KBFGS", "mlp"), equal_shares(ranks)
    x, y = data("mlp", 0)
    before = [p.detach().clone() for p in pair.model.parameters()]
    with pytest.raises(RuntimeError, match="different gradients.*no_sync"), pair.model.no_sync():
        pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, share(x, sizes), share(y, sizes)))
    assert all(torch.equal(p, old) for p, old in zip(pair.model.parameters(), before, strict=True))


@case()
def gradients_that_differ_after_loading(ranks: int) -> None:
    """Gradients are compared once, and once more when a state was loaded."""
    pair, sizes = Pair.of("KBFGS", "mlp"), equal_shares(ranks)
    by_closure(pair, "mlp", sizes, range(2))
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    x, y = data("mlp", 2)
    with pytest.raises(RuntimeError, match="different gradients"), pair.model.no_sync():
        pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, share(x, sizes), share(y, sizes)))


@case()
def zero_redundancy_optimizer(ranks: int) -> None:
    """It gives an optimizer a list of parameters, of which no layer can be told."""
    with pytest.raises(TypeError, match=r"the model comes first.*KBFGS\(model, shard_state=True\)"):
        ZeroRedundancyOptimizer(mlp().parameters(), KBFGS, lr=0.1)
