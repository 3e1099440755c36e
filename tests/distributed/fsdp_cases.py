"""What FSDP2 must not break: weights are whole inside the hooks, and rows of them lie on each rank between passes."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from benchmarks.fsdp2 import rows_of_a_step, sent, update_of_kbfgs
from kfqn_ext._torch import is_divided, own_rows, rest, row_counts, rows_among_zeros, rows_of, units_of_fsdp2
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions import KBFGSQuantities, extend, input_gradients_only
from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
from tests.distributed.cases import (
    CASES,
    F64,
    NETS,
    STEPS,
    TOLERANCE,
    Pair,
    alone,
    assert_equal,
    by_closure,
    case,
    data,
    equal_shares,
    in_a_folder_of_all,
    mlp,
    one_without_data,
    parameters,
    parts_for_dcp,
    read_by_dcp,
    same,
    scaled_loss,
    second_best,
    share,
    unequal_shares,
)
from tests.optim.family import FAMILY

__all__ = ["CASES"]

FIELDS = ("a_bar", "h_bar", "dh_bar")


def whole(model: nn.Module, **options: Any) -> nn.Module:
    """One unit: weights that are gathered for the forward pass stay until the backward pass, where nobody objects."""
    return fully_shard(model, **options)


def by_block(model: nn.Module, **options: Any) -> nn.Module:
    """Units of several layers, so that of each only the last one's output has the hook that gathers."""
    fully_shard([model[0], model[1], model[2]], **options)
    return fully_shard(model, **options)


def by_layer(model: nn.Module, **options: Any) -> nn.Module:
    """A unit for each layer."""
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


WAYS: dict[str, Callable[..., nn.Module]] = {"whole": whole, "by block": by_block, "by layer": by_layer}
RESHARDS: dict[str, dict[str, Any]] = {
    "as torch does": {},
    "always": {"reshard_after_forward": True},
    "never": {"reshard_after_forward": False},
}


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


@case(*((net, way, reshard) for net in ("mlp", "cnn") for way in WAYS for reshard in RESHARDS))
def quantities(ranks: int, which: tuple[str, str, str]) -> None:
    """Of every layer what one process has of this rank's data, in several passes, with and without gradients."""
    net, way, reshard = which
    twin = extend(NETS[net][0]())
    before = WAYS[way](extend(NETS[net][0]()), **RESHARDS[reshard])
    after = extend(WAYS[way](NETS[net][0](), **RESHARDS[reshard]))
    for k, model in enumerate((before, after, before, after)):
        x, y = (share(t, equal_shares(ranks)) for t in data(net, k))
        for frozen in (False, True):
            found, want = (KBFGSQuantities(modules=layers_of(one)) for one in (model, twin))
            for one, ext in ((model, found), (twin, want)):
                with input_gradients_only(one) if frozen else torch.enable_grad(), backpack(ext):
                    F.cross_entropy(one(x), y).backward()
            for got, reference in zip(layers_of(model), layers_of(twin), strict=True):
                q, r = found[got], want[reference]
                for name in FIELDS:
                    same(getattr(q, name), getattr(r, name), 1e-12)
                s = torch.ones_like(r.a_bar)
                same(q.A @ s, r.A @ s, 1e-12)


@case()
def rows_of_divided_tensors(ranks: int) -> None:
    """What is relied on of them: their rows are the tensor's memory, and lie where torch.chunk would put them."""
    for d in range(1, 2 * ranks + 2):
        layer = nn.Linear(3, d).double()
        whole_weight = layer.weight.detach().clone()
        dist.broadcast(whole_weight, 0)
        layer.weight.data.copy_(whole_weight)
        p = fully_shard(layer).weight
        assert is_divided(p) and units_of_fsdp2(layer) == [layer]
        rows, first = rows_of(p), sum(row_counts(d, ranks)[: dist.get_rank()])
        assert torch.equal(rows, whole_weight[first : first + len(rows)])
        padded = rows_among_zeros(p.detach()).clone()
        dist.all_reduce(padded)
        assert torch.equal(padded, whole_weight)
        again = own_rows(whole_weight, p)
        assert is_divided(again) and torch.equal(joined(again), whole_weight)
        with torch.no_grad():
            rows.add_(1.0)
            assert torch.equal(
                layer(torch.zeros(1, 3).double()) * 0 + joined(p).sum(), (whole_weight + 1).sum().expand(1, d)
            )
            assert not is_divided(layer.weight)
        rest(layer)
        assert layer.weight is p


@case("KBFGS", "OnePassKBFGS")
def fsdp_over_one_process(ranks: int, row: str) -> None:
    """A mesh of this rank alone: a training of its own."""
    mesh = DeviceMesh.from_group(alone(), "cpu")
    model, twin = fully_shard(mlp(), mesh=mesh), mlp()
    optimizers = FAMILY[row].make(model, lr=0.1), FAMILY[row].make(twin, lr=0.1, process_group=alone())
    for k in range(4):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.step(Minibatch(one, F.cross_entropy, *data("mlp", k + dist.get_rank())))
    check(Pair(model, optimizers[0], twin, optimizers[1], False))


# ------------------------------------------------------------------ the same steps as one process


def pair_of(row: str, net: str, way: str = "whole", reshard: str = "as torch does", **options: Any) -> Pair:
    """A model that processes share, and its twin that this process trains with the data of all."""
    member, build = FAMILY[row], NETS[net][0]
    model, twin = WAYS[way](build(), **RESHARDS[reshard]), build()
    setting = {"lr": 0.1, "damping": 0.5, **options}
    optimizer = member.make(model, **setting)
    return Pair(model, optimizer, twin, member.make(twin, process_group=alone(), **setting), member.samples)


def joined(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def check(pair: Pair, tolerance: float = TOLERANCE) -> None:
    """Parameters beside those of one process; each layer's state beside its, on one rank, and all other state too."""
    layers = {p: layer for layer in pair.optimizer._planned.layers.values() for p in (layer.weight, layer.bias)}
    owners = pair.optimizer._preconditioner.owners
    for p, twin in zip(parameters(pair.optimizer), parameters(pair.reference), strict=True):
        assert isinstance(p, DTensor)
        same(joined(p), twin, tolerance)
        state = pair.optimizer.state.get(p, {})
        found, want = {key: joined(state[key]) for key in sorted(state)}, pair.reference.state.get(twin, {})
        if p not in layers or owners.owns(layers[p]):
            assert set(found) == set(want), (set(found), set(want))
            for key in want:
                same(found[key], want[key], tolerance)
        else:
            assert set(found) <= {"num_locations"}, set(found)


ROWS_OF_STEPS = {
    "KBFGS": tuple(WAYS),
    "KBFGS, untuned": ("by layer",),
    "KFAC, untuned": ("whole",),
    "KBFGSL": ("by block",),
    "OnePassKBFGS": ("whole", "by layer"),
    "OnePassKFAC": ("by layer",),
}


@case(*((row, net, way) for row, ways in ROWS_OF_STEPS.items() for net in ("mlp", "cnn") for way in ways))
def fsdp_steps(ranks: int, which: tuple[str, str, str]) -> None:
    row, net, way = which
    pair = pair_of(row, net, way, T=2)
    by_closure(pair, net, unequal_shares(ranks))
    check(pair)


@case((F64, "optimizer"), (torch.float32, "model"))
def fsdp_loop_of_any_optimizer(ranks: int, which: tuple[torch.dtype, str]) -> None:
    """Micro-batches, of which the last alone sends gradients; a pass whose gradient nobody wants; evaluations.

    In float32 FSDP2 adds gradients up elsewhere, in the dtype in which it reduces them.
    """
    dtype, cleared = which
    policy = MixedPrecisionPolicy(reduce_dtype=F64)
    model, twin = by_block(mlp().to(dtype), mp_policy=policy), mlp().to(dtype)
    optimizers = [OnePassKBFGS(model), OnePassKBFGS(twin, process_group=alone())]
    pair, sizes = Pair(model, optimizers[0], twin, optimizers[1], False), equal_shares(ranks)

    def clear(one: nn.Module, optimizer: Any) -> None:
        (optimizer if cleared == "optimizer" else one).zero_grad()

    for k in range(STEPS):
        x, y = data("mlp", k)
        x = x.to(dtype)
        for one, optimizer, loss in zip((model, twin), optimizers, (scaled_loss(sizes), F.cross_entropy), strict=True):
            x_, y_ = (share(x, sizes), share(y, sizes)) if one is model else (x, y)
            rest(one)
            clear(one, optimizer)
            loss(one(x_ + 1), y_).backward()
            clear(one, optimizer)
            parts = zip(x_.chunk(2), y_.chunk(2), strict=True) if one is model else [(x_, y_)]
            for number, (x_part, y_part) in enumerate(parts, 1):
                if one is model:
                    model.set_requires_gradient_sync(number == 2)
                loss(one(x_part), y_part).backward()
            with torch.no_grad():
                one(x_)
            optimizer.step()
    check(pair, TOLERANCE if dtype == F64 else 1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "a rate that is a tensor": {"row": "KBFGS, untuned", "lr": torch.tensor([0.1], dtype=F64), "weight_decay": 0.1},
    "rounded directions": {"row": "KBFGS, untuned", "direction_dtype": torch.float32},
    "a cap": {"row": "KBFGS", "step_cap": 1e-3},
}  # fmt: skip


@case(*OPTIONS)
def fsdp_options(ranks: int, name: str) -> None:
    options = dict(OPTIONS[name])
    pair = pair_of(options.pop("row"), "mlp", "by layer", **options)
    by_closure(pair, "mlp", equal_shares(ranks))
    check(pair)


@case("whole", "by layer")
def fsdp_micro_batches(ranks: int, way: str) -> None:
    """Of which the last alone sends gradients; evaluations gather weights in between, and leave them so."""
    pair, sizes = pair_of("KBFGS", "cnn", way), equal_shares(ranks)

    def passes(k: int) -> None:
        x, y = (share(t, sizes).chunk(4) for t in data("cnn", k))
        for number, (x_, y_) in enumerate(zip(x, y, strict=True), 1):
            pair.model.set_requires_gradient_sync(number == 4)
            (scaled_loss(sizes)(pair.model(x_), y_)).backward()

    for k in range(STEPS):
        pair.optimizer.zero_grad()
        with torch.no_grad():
            pair.model(data("cnn", k)[0])
        with pair.optimizer.first_pass(keep_inputs=True):
            passes(k)
        with torch.no_grad():
            pair.model(data("cnn", k)[0])
        pair.optimizer.step()
        if pair.optimizer.second_pass_due:
            before = [p.grad for p in parameters(pair.optimizer)]
            with pair.optimizer.second_pass():
                passes(k)
            assert all(p.grad is g for p, g in zip(parameters(pair.optimizer), before, strict=True))
    for k in range(STEPS):
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, *data("cnn", k)))
    check(pair)


def loss_of(pair: Pair, x: Tensor, y: Tensor) -> Tensor:
    """A closure, as people write it."""
    pair.optimizer.zero_grad()
    loss = F.cross_entropy(pair.model(x), y)
    loss.backward()
    return loss


@case("closure", "Minibatch")
def fsdp_gradients_do_not_pile_up(ranks: int, form: str) -> None:
    """Whatever was gathered when they were cleared; a step by a closure that clears them first is the same."""
    pair, sizes = pair_of("KBFGS", "mlp"), equal_shares(ranks)
    for k in range(4):
        x, y = (share(t, sizes) for t in data("mlp", k))
        with torch.no_grad():
            pair.model(x)
        batch = Minibatch(pair.model, F.cross_entropy, x, y)

        pair.optimizer.step(batch if form == "Minibatch" else partial(loss_of, pair, x, y))
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, *data("mlp", k)))
        for p, twin in zip(parameters(pair.optimizer), parameters(pair.reference), strict=True):
            same(joined(p.grad), twin.grad)
    check(pair)


@case("KBFGS", "KFAC")
def fsdp_warm_start(ranks: int, row: str) -> None:
    pair, sizes = pair_of(row, "mlp", "by block"), equal_shares(ranks)
    x, y = data("mlp", 100)

    def sampled(model: nn.Module) -> Any:
        return lambda batch: F.cross_entropy(model(batch[0]), second_best(model(batch[0]).detach())).backward()

    mine = list(zip(share(x, sizes).split(4), share(y, sizes).split(4), strict=True))
    pair.optimizer.warm_start(mine, sampled(pair.model) if pair.samples else None, progress=False)
    every = list(zip(x.split(4), y.split(4), strict=True))
    pair.reference.warm_start(every, sampled(pair.twin) if pair.samples else None, progress=False)
    by_closure(pair, "mlp", sizes, range(5))
    check(pair)


@case("KBFGS", "KFAC")
def fsdp_warm_start_from_unequal_loaders(ranks: int, row: str) -> None:
    """Of three batches here and one there: who has run out goes on, without counting."""
    pair, sizes = pair_of(row, "mlp", "by layer"), unequal_shares(ranks)
    x, y = data("mlp", 100, sum(sizes))
    sampler = second_best if pair.samples else None

    def loader(model: nn.Module, x: Tensor, y: Tensor) -> list[Minibatch]:
        parts = zip(x.split(5), y.split(5), strict=True)
        return [Minibatch(model, F.cross_entropy, x_, y_, sampler) for x_, y_ in parts]

    mine = loader(pair.model, share(x, sizes), share(y, sizes))
    given = [None] * ranks
    dist.all_gather_object(given, len(mine))
    assert len(set(given)) > 1
    pair.optimizer.warm_start(iter(mine), progress=False)  # whose length nobody knows
    every = [part for x_, y_ in zip(x.split(sizes), y.split(sizes), strict=True) for part in loader(pair.twin, x_, y_)]
    pair.reference.warm_start(every, progress=False)
    by_closure(pair, "mlp", equal_shares(ranks), range(5))
    check(pair)


@case()
def fsdp_warm_start_of_a_rank_without_batches(ranks: int) -> None:
    pair = pair_of("KBFGS", "mlp")
    x, _ = data("mlp", 0)
    with pytest.raises(ValueError, match=f"loaders of 1 of {ranks} processes have no batch.*one batch at least"):
        pair.optimizer.warm_start([(x,)] * dist.get_rank(), progress=False)
    with pytest.raises(ValueError, match="the loader has no batch"):
        pair.optimizer.warm_start([], progress=False)
    assert not pair.optimizer.state
    by_closure(pair, "mlp", equal_shares(ranks), range(3))
    check(pair)


@case("KBFGS", "KBFGS, untuned", "OnePassKBFGS")
def fsdp_batch_that_is_not_finite(ranks: int, row: str) -> None:
    """Of one rank: nobody steps, and all go on."""
    pair, sizes = pair_of(row, "mlp", "by layer"), equal_shares(ranks)
    by_closure(pair, "mlp", sizes, range(3))
    before = [joined(p).clone() for p in parameters(pair.optimizer)]
    x, y = (share(t, sizes).clone() for t in data("mlp", 3))
    x[0, 0] = float("nan") if dist.get_rank() == 0 else 0.0
    pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, x, y, None))
    whole_x, whole_y = data("mlp", 3)  # steps are counted, bad ones too
    pair.reference.step(Minibatch(pair.twin, F.cross_entropy, torch.full_like(whole_x, float("nan")), whole_y))
    for p, old in zip(parameters(pair.optimizer), before, strict=True):
        assert torch.equal(joined(p), old)
    by_closure(pair, "mlp", sizes, range(3, 6))
    check(pair)


@case("KBFGS", "KBFGS, untuned", "OnePassKBFGS")
def fsdp_rank_without_data(ranks: int, row: str) -> None:
    pair = pair_of(row, "mlp", "by layer")
    by_closure(pair, "mlp", one_without_data(ranks))
    check(pair)


@case("KBFGS", "KBFGS, untuned", "OnePassKBFGS")
def fsdp_layer_that_wakes_up(ranks: int, row: str) -> None:
    pair, sizes = pair_of(row, "branches"), equal_shares(ranks)
    by_closure(pair, "branches", sizes, range(4))
    pair.model.both = pair.twin.both = True
    by_closure(pair, "branches", sizes, range(4, STEPS))
    check(pair)


@case()
def fsdp_rows_that_are_not_finite(ranks: int) -> None:
    """Of one rank, which alone sees them: nobody steps."""
    pair, sizes = pair_of("KBFGS", "mlp", "by layer"), equal_shares(ranks)
    by_closure(pair, "mlp", sizes, range(2))
    before = [joined(p).clone() for p in parameters(pair.optimizer)]
    x, y = (share(t, sizes) for t in data("mlp", 2))
    pair.optimizer.zero_grad()
    with pair.optimizer.first_pass():
        scaled_loss(sizes)(pair.model(x), y).backward()
    if dist.get_rank() == 0:
        rows_of(pair.model[0].weight.grad)[0, 0] = float("inf")
    pair.optimizer.step()
    with pair.optimizer.second_pass():
        scaled_loss(sizes)(pair.model(x), y).backward()
    for p, old in zip(parameters(pair.optimizer), before, strict=True):
        assert torch.equal(joined(p), old)
    by_closure(pair, "mlp", sizes, range(3, 6))
    check(pair)


@case()
def minibatch_clears_gradients_of_a_divided_model(ranks: int) -> None:
    """Also on its own, after an evaluation that has left weights gathered."""
    model, twin = whole(mlp()), mlp()
    x, y = data("mlp", 0)
    with torch.no_grad():
        model(x)
    batch = Minibatch(model, F.cross_entropy, x, y)
    for _ in range(3):
        with torch.no_grad():
            model(x)
        batch()
    Minibatch(twin, F.cross_entropy, x, y)()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        same(joined(p.grad), q.grad)


@case("KBFGS", "KBFGS, untuned")
def fsdp_layer_that_is_measured_late(ranks: int, row: str) -> None:
    """Until then it moves as others do, by its owner."""
    pair, sizes = pair_of(row, "skipping", "whole"), equal_shares(ranks)
    for calls, steps in ((False, range(4)), (True, range(4, STEPS))):
        pair.model.calls = pair.twin.calls = calls
        by_closure(pair, "skipping", sizes, steps)
    check(pair)


class Skipping(nn.Module):
    """The first layer's weight is used without the layer, which can't be measured then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.calls = nn.Linear(6, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x) if self.calls else F.linear(x, self.first.weight, self.first.bias)
        return self.last(torch.tanh(hidden))


NETS["skipping"] = lambda: Skipping().double(), (6,)


@case()
def fsdp_state_and_messages(ranks: int) -> None:
    """Layers' state is on one rank each, as the plan says, and a step sends a gradient's size there and back."""
    pair = pair_of("KBFGS", "mlp", "by layer", T=100)
    by_closure(pair, "mlp", equal_shares(ranks), range(2))
    owners = pair.optimizer._preconditioner.owners
    layers = pair.optimizer._planned.layers
    size = sum(t.numel() * t.element_size() for w in layers for t in pair.optimizer.state[w].values())
    sizes = [torch.zeros((), dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor(float(size), dtype=torch.float64))
    told = f"{float(max(sizes)) / float(sum(sizes)):.0%}"
    assert f"{float(owners.share(layers).split('%')[0]):.0f}%" == told, (owners.share(layers), told)
    before = sent(pair.optimizer)
    by_closure(pair, "mlp", equal_shares(ranks), range(2, 3))
    traffic = sent(pair.optimizer) - before
    assert (traffic.row_messages, traffic.rest_messages) == (2, 1)  # there and back; norms
    assert traffic.rows == sum(rows_of_a_step(pair.optimizer))
    total = torch.tensor(traffic.rows)
    dist.all_reduce(total)
    inside = sum(p.numel() for layer in layers.values() for p in (layer.weight, layer.bias)) * 8
    assert int(total) <= 2 * inside


@case()
def fsdp_messages_of_an_update(ranks: int) -> None:
    """Vectors as long as layers are wide: of both passes, with h̄ from rows, and s from its owner."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    model = by_layer(net)
    optimizer, steps = KBFGS.as_printed(model, lr=0.01, damping=1.0, curvature_update_freq=2), []
    for _ in range(4):
        before = sent(optimizer)
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(8, 64, dtype=F64), torch.arange(8) % 3))
        steps.append(sent(optimizer) - before)
    of_update = steps[3] - steps[2]
    assert of_update.rows == of_update.row_messages == 0
    assert of_update.rest_messages == 4 + min(ranks, 3)
    assert 0 <= of_update.rest - update_of_kbfgs(optimizer) <= 8 * 60  # counts, and what ranks agree on


@case()
def fsdp_gradients_that_are_added_to(ranks: int) -> None:
    """In place, in the rows: of that the gradient as a divided tensor tells nothing."""
    pair, sizes = pair_of("KBFGS", "mlp"), equal_shares(ranks)

    def halves(model: nn.Module, x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
        for x_, y_ in zip(x, y, strict=True):
            scaled_loss(sizes)(model(x_), y_).backward()

    for k in range(4):
        x, y = (share(t, sizes).chunk(2) for t in data("mlp", k))
        for p in parameters(pair.optimizer):
            p.grad = torch.zeros_like(p)
        with pair.optimizer.first_pass(keep_inputs=True):
            halves(pair.model, x, y)
        pair.optimizer.step()
        with pair.optimizer.second_pass():
            halves(pair.model, x, y)
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, *data("mlp", k)))
    check(pair)


@case("whole", "by layer")
def fsdp_passes_in_half_precision(ranks: int, way: str) -> None:
    """h̄ of both passes is of W as it is kept: rounded ones would differ by more than the step has moved them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = WAYS[way](mlp().float(), mp_policy=policy)
    optimizer = KBFGS.as_printed(model, lr=1e-3, damping=0.5)
    seen: list[Any] = []
    learn = optimizer._preconditioner.learn

    def noting(due: Any, first: Any, second: Any, *rest: Any) -> None:
        for block in due:
            W, b = (joined(p).detach().double() for p in (block.layer.weight, block.layer.bias))
            seen.append((W, b, *(r[block.layer.module].get(KBFGSQuantities) for r in (first, second))))
        learn(due, first, second, *rest)

    optimizer._preconditioner.learn = noting  # type: ignore[method-assign]
    x, y = (share(t, equal_shares(ranks)) for t in data("mlp", 0))
    before = [(joined(m.weight).detach().double(), joined(m.bias).detach().double()) for m in layers_of(model)]
    optimizer.step(Minibatch(model, F.cross_entropy, x.float(), y))
    assert len(seen) == 3
    for (W1, b1), (W2, b2, first, second) in zip(before, seen, strict=True):
        for (W, b), q in (((W1, b1), first), ((W2, b2), second)):
            same(q.h_bar.double(), W @ q.a_bar[:-1].double() + b, 1e-6)
        assert float((W2 - W1).abs().max()) > 0


@case()
def fsdp_checkpointed_activations(ranks: int) -> None:
    """A unit that runs anew in the backward pass."""
    model, twin = mlp(), extend(mlp())
    inner = extend(fully_shard(Repeated(by_layer(model))))
    x, y = (share(t, equal_shares(ranks)) for t in data("mlp", 0))
    found, want = KBFGSQuantities(), KBFGSQuantities()
    for one, ext in ((inner, found), (twin, want)):
        with backpack(ext):
            F.cross_entropy(one(x), y).backward()
    for got, reference in zip(layers_of(model), layers_of(twin), strict=True):
        for name in FIELDS:
            same(getattr(found[got], name), getattr(want[reference], name), 1e-12)


class Repeated(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=False)


@case()
def fsdp_groups_and_frozen_layers(ranks: int) -> None:
    """Weights and biases with other decays; a layer that is frozen joins later."""
    model, twin = mlp(), mlp()
    for one in (model, twin):
        one[3].requires_grad_(False)
    model = by_block(model)

    def build(given: nn.Module, **options: Any) -> Any:
        trained = [p for p in given.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if (p.ndim > 1) is matrices], "weight_decay": 0.1 * matrices}
            for matrices in (True, False)
        ]
        return FAMILY["KBFGS"].make(given, params=groups, lr=0.1, damping=0.5, **options)

    pair = Pair(model, build(model), twin, build(twin, process_group=alone()), False)
    by_closure(pair, "mlp", unequal_shares(ranks), range(4))
    for one, optimizer in ((model, pair.optimizer), (twin, pair.reference)):
        one[3].requires_grad_(True)
        optimizer.add_param_group({"params": list(one[3].parameters())})
    by_closure(pair, "mlp", unequal_shares(ranks), range(4, STEPS))
    check(pair)


# ------------------------------------------------------------------ what is refused, before anything moves


def refused(error: type[Exception], message: str, build: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        build()


@case()
def fsdp_optimizer_that_was_built_before(ranks: int) -> None:
    for row in ("KBFGS", "OnePassKBFGS"):
        model = mlp()
        optimizer = FAMILY[row].make(model, lr=0.1)
        fully_shard(model)
        before = [joined(p).clone() for p in model.parameters()]
        x, y = (share(t, equal_shares(ranks)) for t in data("mlp", 0))
        step = partial(optimizer.step, Minibatch(model, F.cross_entropy, x, y))
        refused(RuntimeError, r"fully_shard was called after.*0\.weight.*Build it after fully_shard", step)
        assert all(torch.equal(joined(p), old) for p, old in zip(model.parameters(), before, strict=True))


@case()
def fsdp_other_ways_to_divide(ranks: int) -> None:
    line, plane = (
        init_device_mesh("cpu", (ranks,)),
        init_device_mesh("cpu", (1, ranks), mesh_dim_names=("copies", "rows")),
    )
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    tensor_parallel = parallelize_module(net, line, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    extended = extend(tensor_parallel)
    with (
        pytest.raises(UnsupportedLayerError, match="divided among processes.*fully_shard"),
        backpack(KBFGSQuantities()),
    ):
        extended(data("mlp", 0)[0]).sum().backward()
    halves = mlp()
    fully_shard(halves[0], mesh=line)
    by_columns = fully_shard(nn.Linear(8, 8, bias=False), shard_placement_fn=lambda p: Shard(1))
    outside = mlp()
    fully_shard(outside, ignored_params={outside[0].weight})
    with torch.device("meta"):
        empty = fully_shard(mlp())
    fsdp1 = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # whose constructor asks for a GPU
    nn.Module.__init__(fsdp1)
    fsdp1._modules["_fsdp_wrapped_module"] = mlp()
    alone_ = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for message, model in (
        ("tensor parallelism.*DistributedDataParallel", tensor_parallel),
        ("a mesh of 2 dimensions.*one dimension", fully_shard(mlp(), mesh=plane)),
        (r"FullyShardedDataParallel keeps.*fully_shard\(model\)", fsdp1),
        (r"2.weight.*outside of all units.*fully_shard\(model\)", halves),
        ("not by rows.*shard_placement_fn", by_columns),
        ("0.weight.*without ignored_params", outside),
        ("on device meta.*offload_policy", empty),
    ):
        refused(UnsupportedLayerError, message, lambda m=model: KBFGS(m))
    refused(ValueError, "process_group is not that of.*Leave it out", lambda: KBFGS(whole(mlp()), process_group=alone_))


@case()
def fsdp_gradient_that_nobody_averages(ranks: int) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    fully_shard(model[3])
    fully_shard(model[5])
    fully_shard(model, ignored_params=set(model[0].parameters()))
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.5)
    model[0].requires_grad_(True)
    before = [joined(p).clone() for p in model.parameters()]
    step = partial(optimizer.step, Minibatch(model, F.cross_entropy, *data("mlp", 0)))
    refused(RuntimeError, r"shapes \[\[7, 6\], \[7\]\].*outside of all units.*keep them frozen", step)
    assert all(torch.equal(joined(p), old) for p, old in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------ checkpoints


@case("KBFGS", "KBFGS, untuned", "KFAC, untuned", "OnePassKBFGS")
def fsdp_checkpoints(ranks: int, row: str) -> None:
    """From FSDP2 to FSDP2 in other units, to DDP and to one process; and from DDP to FSDP2."""
    pair, sizes = pair_of(row, "mlp", "by layer"), equal_shares(ranks)
    by_closure(pair, "mlp", sizes, range(5))
    whole_twin = copy.deepcopy((pair.twin.state_dict(), pair.reference.state_dict()))

    def at_half(new: Pair) -> Pair:
        with torch.no_grad():
            for p in new.model.parameters():
                p.zero_()
        new.twin.load_state_dict(whole_twin[0])
        new.reference.load_state_dict(copy.deepcopy(whole_twin[1]))
        return new

    def run(folder: str) -> None:
        dcp.save(parts_for_dcp(pair.model, pair.optimizer), checkpoint_id=folder)
        new = at_half(pair_of(row, "mlp", "whole"))
        read_by_dcp(new.model, new.optimizer, folder, in_one=False)
        by_closure(new, "mlp", sizes, range(5, STEPS))
        check(new)
        copies = at_half(Pair.of(row, "mlp"))
        read_by_dcp(copies.model, copies.optimizer, folder, in_one=False)
        by_closure(copies, "mlp", sizes, range(5, STEPS))
        copies.check()
        model = mlp()
        optimizer = FAMILY[row].make(model, lr=0.1, damping=0.5, process_group=alone())
        read_by_dcp(model, optimizer, folder, in_one=True)
        assert_equal(model, optimizer, pair.twin, pair.reference)

    def back(folder: str) -> None:
        copies = Pair.of(row, "mlp", shard_state=True)
        by_closure(copies, "mlp", sizes, range(5))
        dcp.save(parts_for_dcp(copies.model, copies.optimizer), checkpoint_id=folder)
        new = at_half(pair_of(row, "mlp", "by block"))
        read_by_dcp(new.model, new.optimizer, folder, in_one=False)
        by_closure(new, "mlp", sizes, range(5, STEPS))
        check(new)

    in_a_folder_of_all(run)
    in_a_folder_of_all(back)


NETS["narrow"] = lambda: nn.Sequential(nn.Linear(6, 2), nn.PReLU(2), nn.Linear(2, 3)).double(), (6,)


@case(("KBFGS", "mlp"), ("KBFGS, untuned", "mlp"), ("KBFGS, untuned", "narrow"))
def fsdp_whole_state_on_one_rank(ranks: int, which: tuple[str, str]) -> None:
    """Two numbers that a rule keeps of a parameter with two entries are no rows of it."""
    row, net = which
    torch.manual_seed(0)
    pair, sizes = pair_of(row, net, "by layer"), equal_shares(ranks)
    for p, q in zip(parameters(pair.optimizer), parameters(pair.reference), strict=True):
        q.detach().copy_(joined(p).detach())
    by_closure(pair, net, sizes, range(5))
    given = [pair.optimizer.gather_state(ranks - 1)]
    assert (given[0] is None) is (dist.get_rank() != ranks - 1)
    dist.broadcast_object_list(given, ranks - 1)
    for key, state in pair.reference.state_dict()["state"].items():
        assert set(given[0]["state"].get(key, {})) == set(state)
        for name in state:
            same(given[0]["state"][key][name], state[name])
    pair.reference.load_state_dict(copy.deepcopy(given[0]))
    pair.optimizer.load_state_dict(copy.deepcopy(given[0]))
    by_closure(pair, net, sizes, range(5, STEPS))
    check(pair)
