"""What several processes must do as one: each case is run by all ranks, and beside it by one process with all data."""

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY

F64 = torch.float64
STEPS, TOLERANCE = 10, 1e-10
ROWS = ("KBFGS", "KBFGSL", "KBFGS20", "KFAC", "KFAC as printed", "KBFGS, untuned", "KFAC, untuned", "OnePassKBFGS")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, bias=False),
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    ).double()  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"mlp": (mlp, (6,)), "cnn": (cnn, (2, 8, 8))}


def data(net: str, k: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(size, *NETS[net][1], dtype=F64, generator=generator), torch.arange(size) % 3


def second_best(output: Tensor, *unused: Any) -> Tensor:
    return output.topk(2, dim=1).indices[:, 1]


def share(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """This rank's data."""
    return x.split(sizes)[dist.get_rank()]


_ALONE: list[Any] = []


def alone() -> Any:
    """A group of this process."""
    if not _ALONE:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _ALONE.append(groups[dist.get_rank()])
    return _ALONE[0]


def states(optimizer: Any) -> list[Tensor]:
    """All of an optimizer's state, in order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p][key] for p in parameters if p in optimizer.state for key in sorted(optimizer.state[p])]


def assert_equal(
    model: nn.Module, optimizer: Any, twin: nn.Module, reference: Any, tolerance: float = TOLERANCE
) -> None:
    """Parameters and state of several processes beside those of one."""
    pairs = zip([*model.parameters(), *states(optimizer)], [*twin.parameters(), *states(reference)], strict=True)
    for got, want in pairs:
        got, want = got.detach(), want.detach()
        assert got.shape == want.shape
        scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
        apart = float((got - want).abs().max()) / scale if want.numel() else 0.0
        assert apart <= tolerance, apart


@dataclass
class Pair:
    """A model that all ranks train, and its twin that this process trains with the data of all."""

    model: Any
    optimizer: Any
    twin: nn.Module
    reference: Any
    samples: bool

    @classmethod
    def of(cls, row: str, net: str, wrapped: str = "wrapper", **options: Any) -> "Pair":
        member, build = FAMILY[row], NETS[net][0]
        inner, twin = build(), build()
        ddp = DDP(inner, **options.pop("ddp", {}))
        setting = {"lr": 0.1, "damping": 0.5, **options}
        given = {"wrapper": ddp, "holder": nn.Sequential(ddp), "group": inner}[wrapped]
        group = {"process_group": dist.group.WORLD} if wrapped == "group" else {}
        return cls(
            ddp,
            member.make(given, **setting, **group),
            twin,
            member.make(twin, process_group=alone(), **setting),
            member.samples,
        )

    def check(self, tolerance: float = TOLERANCE) -> None:
        assert_equal(self.model, self.optimizer, self.twin, self.reference, tolerance)


Sizes = tuple[int, ...]


def equal_shares(ranks: int) -> Sizes:
    return (16 // ranks,) * ranks


def unequal_shares(ranks: int) -> Sizes:
    return (16 - 2 * (ranks - 1), *(2 for _ in range(ranks - 1)))


def one_without_data(ranks: int) -> Sizes:
    return (0, *(16 // (ranks - 1) for _ in range(ranks - 1)))


def scaled_loss(sizes: Sizes) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a rank: its mean over ranks is the mean over all data."""
    return lambda output, y: F.cross_entropy(output, y, reduction="sum") * (len(sizes) / sum(sizes))


class Batch(Minibatch):
    """A minibatch that may be empty."""

    def __init__(self, *given: Any) -> None:
        self.model, self.loss_fn, self.x, self.y, self.sample_targets = given


def by_closure(pair: Pair, net: str, sizes: Sizes, steps: range = range(STEPS)) -> None:
    """Shares with losses scaled to them, and all data for the twin."""
    sampler = second_best if pair.samples else None
    for k in steps:
        x, y = data(net, k, sum(sizes))
        pair.optimizer.step(Batch(pair.model, scaled_loss(sizes), share(x, sizes), share(y, sizes), sampler))
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, x, y, sampler))


def in_phases(pair: Pair, net: str, sizes: Sizes, micro: int = 1, part: float = 1.0) -> None:
    """Micro-batches of a share, of which the last alone sends gradients; the second pass may take a part of it."""

    def passes(k: int, part: float = 1.0) -> None:
        x, y = data(net, k, sum(sizes))
        x, y = share(x, sizes), share(y, sizes)
        pieces = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for number, (x_, y_) in enumerate(pieces, 1):
            taken = math.ceil(len(x_) * part)
            with nullcontext() if number == len(pieces) else pair.model.no_sync():
                (scaled_loss(sizes)(pair.model(x_[:taken]), y_[:taken]) / part).backward()

    for k in range(STEPS):
        pair.model.zero_grad()
        with pair.optimizer.first_pass(keep_inputs=True):
            passes(k)
        pair.optimizer.step()
        if pair.optimizer.second_pass_due:
            with pair.optimizer.second_pass():
                passes(k, part)


def reference_steps(pair: Pair, net: str, size: int = 16) -> None:
    for k in range(STEPS):
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, *data(net, k, size)))


def plain(pair: Pair, net: str, sizes: Sizes) -> None:
    """The loop of any optimizer."""
    for k in range(STEPS):
        x, y = data(net, k, sum(sizes))
        scaled_loss(sizes)(pair.model(share(x, sizes)), share(y, sizes)).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()


CASES: dict[str, Callable[[int], None]] = {}


def case(*values: Any) -> Callable[[Any], Any]:
    """Register a case, or one for each of some values of its second argument."""

    def register(function: Any) -> Any:
        name = function.__name__.replace("_", " ")
        for value in values:
            CASES[f"{name}: {value}"] = partial(_with, function, value)
        if not values:
            CASES[name] = function
        return function

    return register


def _with(function: Any, value: Any, ranks: int) -> None:
    function(ranks, value)


# ------------------------------------------------------------------ the same steps as one process


@case(*((row, net) for row in ROWS for net in NETS))
def every_row(ranks: int, which: tuple[str, str]) -> None:
    pair = Pair.of(which[0], which[1], T=2)
    by_closure(pair, which[1], equal_shares(ranks))
    pair.check()


@case("holder", "group")
def what_is_given(ranks: int, wrapped: str) -> None:
    pair = Pair.of("KBFGS", "mlp", wrapped)
    by_closure(pair, "mlp", equal_shares(ranks))
    pair.check()
    assert all("module" not in name for name in pair.optimizer.param_groups[0].get("param_names", [])) or (
        wrapped == "holder"
    )


@case("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
def options_of_the_wrapper(ranks: int, option: str) -> None:
    pair = Pair.of("KBFGS", "cnn", ddp={option: True})
    by_closure(pair, "cnn", equal_shares(ranks))
    pair.check()


@case("KBFGS", "KFAC", "OnePassKBFGS", "KBFGS, untuned")
def unequal_shares_with_scaled_losses(ranks: int, row: str) -> None:
    pair = Pair.of(row, "cnn")
    by_closure(pair, "cnn", unequal_shares(ranks))
    pair.check()


@case("KBFGS", "KFAC", "OnePassKBFGS", "KBFGS, untuned")
def a_rank_without_data(ranks: int, row: str) -> None:
    pair = Pair.of(row, "mlp")
    by_closure(pair, "mlp", one_without_data(ranks))
    pair.check()


@case()
def micro_batches_under_no_sync(ranks: int) -> None:
    pair = Pair.of("KBFGS", "cnn")
    in_phases(pair, "cnn", equal_shares(ranks), micro=4)
    reference_steps(pair, "cnn")
    pair.check()


@case()
def the_loop_of_any_optimizer(ranks: int) -> None:
    pair = Pair.of("OnePassKBFGS", "cnn")
    plain(pair, "cnn", unequal_shares(ranks))
    reference_steps(pair, "cnn")
    pair.check()


@case()
def a_sum_over_data(ranks: int) -> None:
    """Its gradient is the sum over the number of ranks, for the wrapper takes a mean: the rate is that times larger."""
    pair = Pair.of("KBFGS", "mlp", reduction="sum")
    for group in pair.optimizer.param_groups:
        group["lr"] = 0.02 * ranks
    for group in pair.reference.param_groups:
        group["lr"] = 0.02
    loss = nn.CrossEntropyLoss(reduction="sum")
    sizes = equal_shares(ranks)
    for k in range(STEPS):
        x, y = data("mlp", k)
        pair.optimizer.step(Minibatch(pair.model, loss, share(x, sizes), share(y, sizes)))
        pair.reference.step(Minibatch(pair.twin, loss, x, y))
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert float((p - q).detach().abs().max()) < 1e-10


@case()
def a_cap_on_steps(ranks: int) -> None:
    """It compares with the loss of all data: one rank's own would give each its own step."""
    pair = Pair.of("KBFGS", "mlp", step_cap=1e-3)
    by_closure(pair, "mlp", equal_shares(ranks))
    pair.check()


@case("KBFGS", "KFAC")
def warm_start(ranks: int, row: str) -> None:
    """Loaders of other lengths, and of batches of other sizes."""
    pair, sizes = Pair.of(row, "cnn"), unequal_shares(ranks)
    x, y = data("cnn", 100, sum(sizes))
    mine, mine_y = share(x, sizes), share(y, sizes)

    def sampled(model: nn.Module) -> Any:
        return None if row == "KBFGS" else lambda b: F.cross_entropy(model(b[0]), second_best(model(b[0]))).backward()

    loader = list(zip(mine.split(5), mine_y.split(5), strict=True))
    pair.optimizer.warm_start(loader, forward=sampled(pair.model.module), progress=False)
    pair.reference.warm_start([(x, y)], forward=sampled(pair.twin), progress=False)
    by_closure(pair, "cnn", equal_shares(ranks), range(3))
    pair.check()


@case()
def a_part_in_the_second_pass(ranks: int) -> None:
    """Of each share its first half: one process takes the same data."""
    pair, sizes = Pair.of("KBFGS", "mlp", second_pass_fraction=0.5), equal_shares(ranks)
    for k in range(STEPS):
        x, y = data("mlp", k)
        pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, share(x, sizes), share(y, sizes)))
        halves = [half for piece in torch.arange(16).split(sizes[0]) for half in (piece[: sizes[0] // 2],)]
        first = torch.cat(halves)
        order = torch.cat((first, torch.tensor([i for i in range(16) if i not in set(first.tolist())])))
        pair.reference.step(Minibatch(pair.twin, F.cross_entropy, x[order], y[order]))
    pair.check()


class SyncedNorm(torch.autograd.Function):
    """The sum over ranks of a tensor; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class BatchNormOverRanks(nn.BatchNorm2d):
    """Batch normalization with the statistics of all ranks: torch's own takes no tensors of a CPU."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        count = x.numel() / x.shape[1] * dist.get_world_size(self.group)
        mean = SyncedNorm.apply(x.sum((0, 2, 3)), self.group) / count
        centred = x - mean[:, None, None]
        var = SyncedNorm.apply(centred.square().sum((0, 2, 3)), self.group) / count
        normal = centred * (var + self.eps).rsqrt()[:, None, None]
        assert self.weight is not None and self.bias is not None
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), BatchNormOverRanks(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), nn.Flatten(),
        nn.Linear(48, 3),
    ).double()  # fmt: skip


NETS["norm"] = norm_net, (2, 8, 8)


@case("KBFGS", "KBFGS, untuned")
def batch_normalization_over_ranks(ranks: int, row: str) -> None:
    pair = Pair.of(row, "norm")
    pair.model.module[1].group = dist.group.WORLD
    by_closure(pair, "norm", equal_shares(ranks))
    pair.check(1e-9)
    spared = [optimizer._preconditioner.normalized.known for optimizer in (pair.optimizer, pair.reference)]
    assert [len(known) for known in spared] == [1, 1]


# ------------------------------------------------------------------ copies that stay one


@case("KBFGS", "OnePassKBFGS", "KFAC, untuned")
def copies_are_equal_to_the_last_bit(ranks: int, row: str) -> None:
    """After fifty steps in float32, with dropout of each rank's own."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3)))
    optimizer, member = FAMILY[row].make(model, lr=0.05, damping=0.5, T=2), FAMILY[row]
    torch.manual_seed(dist.get_rank())
    for _ in range(50):
        x = torch.randn(8, 6)
        optimizer.step(
            Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3, second_best if member.samples else None)
        )
    for tensor in [*model.parameters(), *states(optimizer)]:
        mine = tensor.detach().double().contiguous()
        others = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(others, mine)
        assert all(torch.equal(mine, other) for other in others)


@case()
def buffers_stay_as_those_of_one_pass(ranks: int) -> None:
    """Running statistics are sent by the first pass of a step, as without an optimizer that runs two."""
    runs = []
    for second in (True, False):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)))
        optimizer = KBFGS.as_printed(model, lr=0.0, damping=1.0, curvature_update_freq=1 if second else 100)
        for k in range(4):
            x, y = data("mlp", 10 * k + dist.get_rank())
            optimizer.step(Minibatch(model, F.cross_entropy, x.float(), y))
        runs.append([b.clone() for b in model.buffers()])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------ how much is sent


@case()
def what_an_update_sends(ranks: int) -> None:
    """K-BFGS: vectors as long as layers are wide; KFAC: matrices. Nothing in steps without an update."""
    found: dict[str, list[int]] = {}
    for width in (64, 128):
        for row in ("KBFGS", "KFAC"):
            torch.manual_seed(0)
            model = DDP(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)))
            member = FAMILY[row]
            optimizer = member.make(model, lr=0.01, damping=1.0, T=2)
            ranks_of_it = optimizer._passes.ranks
            sent = []
            for k in range(4):
                before = ranks_of_it.bytes_sent, ranks_of_it.messages
                x = torch.randn(8, width, generator=torch.Generator().manual_seed(k))
                sampler = (lambda output, y, g: y) if member.samples else None
                optimizer.step(Minibatch(model, nn.MSELoss(), x, x, sampler))
                sent.append((ranks_of_it.bytes_sent - before[0], ranks_of_it.messages - before[1]))
            assert sent[2] == (0, 0), sent
            found.setdefault(row, []).append(sent[3][0])
            if row == "KBFGS":
                assert sent[3][1] == 3, sent
                d_in, d_out = width + 1, width
                vectors = 2 * (2 * d_in + 5 * d_out)  # ā and A s; ∂h̄ and its noise; h̄, ∂h̄ and its noise
                assert 4 * vectors <= sent[3][0] <= 4 * vectors + 120, (sent, vectors)
    assert 1.9 < found["KBFGS"][1] / found["KBFGS"][0] < 2.1
    assert 3.8 < found["KFAC"][1] / found["KFAC"][0] < 4.2


# ------------------------------------------------------------------ what is refused


@case()
def nobody_says_who_trains_together(ranks: int) -> None:
    model = mlp()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0)
    x, y = data("mlp", 0)
    with pytest.raises(RuntimeError, match=r"process_group=.*group\.WORLD.*new_group"):
        optimizer.step(Minibatch(model, F.cross_entropy, x, y))


@case()
def gradients_that_differ(ranks: int) -> None:
    model = mlp()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, process_group=dist.group.WORLD)
    x, y = data("mlp", dist.get_rank())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="different gradients.*DistributedDataParallel"):
        optimizer.step(Minibatch(model, F.cross_entropy, x, y))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@case()
def no_rank_has_data(ranks: int) -> None:
    pair, sizes = Pair.of("KBFGS", "mlp"), (0,) * ranks
    x, y = data("mlp", 0, 0)
    loss = lambda output, y: 0 * output.sum()  # noqa: E731
    with pytest.raises(ValueError, match="batches of all ranks are empty"):
        pair.optimizer.step(Batch(pair.model, loss, share(x, sizes), share(y, sizes), None))


@case()
def join(ranks: int) -> None:
    pair = Pair.of("KBFGS", "mlp")
    x, y = data("mlp", 0)
    with pytest.raises(RuntimeError, match="join.*DistributedSampler"), pair.model.join():
        pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, x, y))


# ------------------------------------------------------------------ states


@case()
def saved_by_several_and_loaded_by_one(ranks: int) -> None:
    """And the other way: all ranks hold the same."""
    pair = Pair.of("KBFGS", "mlp")
    by_closure(pair, "mlp", equal_shares(ranks), range(5))
    file = io.BytesIO()
    torch.save([pair.model.module.state_dict(), pair.optimizer.state_dict()], file)
    file.seek(0)
    model, state = torch.load(file, weights_only=True)
    pair.twin.load_state_dict(model)
    pair.reference.load_state_dict(state)
    by_closure(pair, "mlp", equal_shares(ranks), range(5, STEPS))
    pair.check()
