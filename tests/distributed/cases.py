"""What several processes must do as one: each case is run by all ranks, and beside it by one process with all data."""

import copy
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from kfqn_ext.linalg import damped_inverse
from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS, gate
from kfqn_ext.optim.inverses import FisherAction, direct, hessian_action
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import snapshot
from tests.optim.family import FAMILY
from tests.optim.test_no_waiting import Reads

F64 = torch.float64
STEPS, TOLERANCE = 10, 1e-10
ROWS = (
    "KBFGS",
    "KBFGSL",
    "KBFGS20",
    "KFAC",
    "KFAC as printed",
    "KBFGS, untuned",
    "KFAC, untuned",
    "OnePassKBFGS",
    "OnePassKFAC",
)


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


def same(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.numel():
        apart = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-30)
        assert apart <= tolerance, apart


CASES: dict[str, Callable[[int], None]] = {}
QUICK: set[str] = set()
"""Of those for many values, the ones for the first and the last."""


def case(*values: Any) -> Callable[[Any], Any]:
    """Register a case, or one for each of some values of its second argument."""

    def register(function: Any) -> Any:
        name = function.__name__.replace("_", " ")
        found = {f"{name}: {value}": partial(_with, function, value) for value in values} or {name: function}
        CASES.update(found)
        first, *_, last = [*found, *found]
        QUICK.update((first, last))
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


@case("KBFGS", "KFAC", "OnePassKBFGS", "OnePassKFAC", "KBFGS, untuned")
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
def warm_start_of_a_rank_without_batches(ranks: int) -> None:
    """It has no part in the averages; without any all say so."""
    pair = Pair.of("KBFGS", "cnn")
    x, y = data("cnn", 100)
    mine = [] if dist.get_rank() == 0 else [(part,) for part in x.chunk(ranks - 1)[dist.get_rank() - 1].split(3)]
    pair.optimizer.warm_start(mine, progress=False)
    pair.reference.warm_start([(x,)], progress=False)
    by_closure(pair, "cnn", equal_shares(ranks), range(3))
    pair.check()
    with pytest.raises(ValueError, match="the loader has no batch"):
        pair.optimizer.warm_start([], progress=False)


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


def equal_on_all_ranks(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        mine = tensor.detach().double().contiguous()
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        assert all(torch.equal(mine, other) for other in others)


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
    equal_on_all_ranks([*model.parameters(), *states(optimizer)])


@case("KBFGS", "OnePassKBFGS")
def copies_are_repaired_alike(ranks: int, row: str) -> None:
    """Where rounding has made an inverse indefinite, here by hand."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))
    optimizer = FAMILY[row].make(model, lr=0.0, damping=0.5)
    torch.manual_seed(dist.get_rank())
    for k in range(16):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(8, 6), torch.arange(8) % 3))
        inverses = [state[name] for state in optimizer.state.values() for name in ("H_A", "H_G") if name in state]
        for H in inverses if k == 14 else ():
            H -= 2 * H.mean()  # negative along a vector of ones
    assert all((torch.linalg.eigvalsh(H.double()) > 0).all() for H in inverses)
    equal_on_all_ranks(inverses)


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


@contextmanager
def inversions() -> Iterator[list[int]]:
    """The sizes of the matrices that this process inverts in the body."""
    found: list[int] = []

    def noting(A: Tensor, damping: Any) -> Tensor:
        found.extend([] if A.is_meta else [A.shape[-1]])
        return damped_inverse(A, damping)

    with pytest.MonkeyPatch.context() as patch:
        for rules in (direct, hessian_action):
            patch.setattr(rules, "damped_inverse", noting)
        yield found


def random_batch(model: nn.Module, row: str, width: int) -> Minibatch:
    """Of normal targets; a recipe that samples gets the same ones."""
    x = torch.randn(8, width)
    return Minibatch(model, nn.MSELoss(), x, x, (lambda output, y, g: y) if FAMILY[row].samples else None)


@case("KBFGS", "KBFGSL, untuned", "KBFGS20", "KFAC as printed", "KFAC, untuned")
def each_matrix_is_inverted_once(ranks: int, row: str) -> None:
    """By one rank, for all copies, which stay equal to the last bit; large ones are sent as they lie."""
    torch.manual_seed(0)
    layers = [nn.Linear(9, 9) for _ in range(2 * ranks)] + [nn.Linear(9, 260), nn.Linear(260, 9)]
    model, twin, found = DDP(nn.Sequential(*layers)), copy.deepcopy(nn.Sequential(*layers)), []
    for net, options in ((model, {}), (twin, {"process_group": alone()})):
        optimizer = FAMILY[row].make(net, lr=0.01, damping=1.0, **options)
        torch.manual_seed(dist.get_rank())
        with inversions() as sizes:
            for _ in range(3):
                optimizer.step(random_batch(net, row, 9))
        found.append(sizes)
        equal_on_all_ranks([*net.parameters(), *states(optimizer)] if net is model else [])
    every = [None] * ranks
    dist.all_gather_object(every, found[0])
    assert sorted(size for sizes in every for size in sizes) == sorted(found[1]), (every, found)
    assert all(every)  # nobody has only waited


@case()
def a_warm_start_between_steps(ranks: int) -> None:
    """Of copies: momenta stay, and so does what a rule of lengths keeps."""
    for row in ("KBFGS, untuned", "KFAC, untuned"):
        pair, sizes = Pair.of(row, "mlp"), equal_shares(ranks)
        for k in range(2):
            by_closure(pair, "mlp", sizes, range(3 * k, 3 * k + 3))
            for model, optimizer, (x, y) in (
                (pair.model.module, pair.optimizer, [share(t, sizes) for t in data("mlp", 100)]),
                (pair.twin, pair.reference, data("mlp", 100)),
            ):
                batch = Minibatch(model, F.cross_entropy, x, y, second_best if pair.samples else None)
                optimizer.warm_start([batch], progress=False)
        by_closure(pair, "mlp", sizes, range(6, STEPS))
        pair.check()


# ------------------------------------------------------------------ how often the host waits


@contextmanager
def reads() -> Iterator[list[str]]:
    """Every place where the host waits for a device in the body, were there one: by one number, or by several."""
    with pytest.MonkeyPatch.context() as patch, Reads(set()) as mode:
        patch.setattr(LateWarning, "_read", lambda self, flag: None)  # on a GPU it has arrived by then
        for module in (snapshot, gate):
            patch.setattr(module, "is_on_host", lambda t: False)
        tolist, as_float = Tensor.tolist, Tensor.__float__
        patch.setattr(Tensor, "tolist", lambda t: (mode.found.append("tolist"), tolist(t))[1])
        # |T| of a layer, which lives on the host and in float32; all else is in float64 here
        patch.setattr(Tensor, "__float__", lambda t: t.numpy().item() if t.dtype == torch.float32 else as_float(t))
        yield mode.found


@case(("KBFGS", False), ("KBFGS, untuned", True), ("KFAC", False), ("OnePassKBFGS", False))
def one_wait_in_an_update(ranks: int, which: tuple[str, bool]) -> None:
    """It reads the counts, on which depends who has learned what; and none in other steps."""
    row, shard_state = which
    pair, sizes = Pair.of(row, "cnn", T=2, shard_state=shard_state), equal_shares(ranks)
    by_closure(pair, "cnn", sizes, range(8))  # the network is looked at, now and then
    found = []
    for k in range(8, 12):
        x, y = (share(t, sizes) for t in data("cnn", k))
        batch = Minibatch(pair.model, scaled_loss(sizes), x, y, second_best if pair.samples else None)
        with reads() as waits:
            pair.optimizer.step(batch)
        found.append(waits)
    assert found == [[], ["tolist"], [], ["tolist"]], found


@case("KBFGS", "KBFGS, untuned")
def a_second_pass_over_other_counts(ranks: int, row: str) -> None:
    """Of one rank, in one layer: nothing is learned by any, and all go on."""
    pair, sizes = Pair.of(row, "mlp"), equal_shares(ranks)
    by_closure(pair, "mlp", sizes, range(3))
    x, y = (share(t, sizes) for t in data("mlp", 3))
    with pytest.warns(UserWarning, match="other data"):
        pair.optimizer.zero_grad()
        with pair.optimizer.first_pass():
            scaled_loss(sizes)(pair.model(x), y).backward()
        pair.optimizer.step()
        before = [t.clone() for t in states(pair.optimizer)]
        with pair.optimizer.second_pass():
            loss = scaled_loss(sizes)(pair.model(x), y)
            if dist.get_rank() == 0:  # one call more of the last layer
                loss = loss + pair.model.module[5](torch.ones(1, 5, dtype=F64)).sum()
            loss.backward()
    learned = states(pair.optimizer)
    assert all(map(torch.equal, before, learned))
    equal_on_all_ranks([*pair.model.parameters(), *learned])
    by_closure(pair, "mlp", sizes, range(4, 6))
    equal_on_all_ranks([*pair.model.parameters(), *states(pair.optimizer)])


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
            optimizer = member.make(model, lr=0.01, damping=1.0, T=2, **member.taken(inverse_update_freq=2))
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


class Again(nn.Module):
    """Of its two layers the first one's weight is multiplied again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.linear(self.first(x).tanh(), self.first.weight).tanh())


NETS["again"] = lambda: Again().double(), (6,)


@case("KBFGS, untuned", "OnePassKBFGS")
def a_weight_that_is_multiplied_again(ranks: int, row: str) -> None:
    pair = Pair.of(row, "again")
    by_closure(pair, "again", equal_shares(ranks))
    pair.check()
    with_block = [name for name, p in pair.twin.named_parameters() if "num_locations" in pair.reference.state[p]]
    assert with_block == ["last.weight"]


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


# ------------------------------------------------------------------ state that is divided among ranks

SHARDED = (
    "KBFGS", "KBFGSL", "KBFGS20", "KFAC", "KFAC as printed", "KBFGS, untuned", "KFAC, untuned", "L-BFGS for both",
    "one pass", "trace split", "OnePassKBFGS", "OnePassKFAC",
)  # fmt: skip


def is_mark(state: dict[str, Tensor]) -> bool:
    """What a rank keeps of a layer that another one owns."""
    return set(state) == {"num_locations"}


def parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_shards(pair: Pair, tolerance: float = TOLERANCE) -> None:
    """Parameters beside those of one process; each state beside one of its states, on exactly one rank."""
    layers = {p: layer for layer in pair.optimizer._planned.layers.values() for p in (layer.weight, layer.bias)}
    twins = list(zip(parameters(pair.optimizer), parameters(pair.reference), strict=True))
    elsewhere = {p for p, _ in twins if p in layers and is_mark(pair.optimizer.state[layers[p].weight])}
    kept = torch.tensor([p not in elsewhere for p, _ in twins if p in layers], dtype=torch.int64)
    dist.all_reduce(kept)  # before anything here can fail on one rank alone
    assert bool((kept == 1).all()), kept
    for p, twin in twins:
        same(p, twin, tolerance)
        state, want = pair.optimizer.state.get(p, {}), pair.reference.state.get(twin, {})
        if p not in elsewhere:
            assert set(state) == set(want)
            for key in want:
                same(state[key], want[key], tolerance)
        elif is_mark(state):
            same(state["num_locations"], want["num_locations"])


@case(*((row, net) for row in SHARDED for net in ("mlp", "cnn")))
def sharded(ranks: int, which: tuple[str, str]) -> None:
    pair = Pair.of(which[0], which[1], T=2, shard_state=True)
    by_closure(pair, which[1], unequal_shares(ranks))
    check_shards(pair)


@case()
def sharded_micro_batches_under_no_sync(ranks: int) -> None:
    pair = Pair.of("KBFGS", "cnn", shard_state=True, weight_decay=0.1)
    in_phases(pair, "cnn", equal_shares(ranks), micro=4)
    reference_steps(pair, "cnn")
    check_shards(pair)


OPTIONS_OF_STEPS: dict[str, dict[str, Any]] = {
    "a rate that is a tensor, and decay": {"lr": torch.tensor([0.1], dtype=F64), "weight_decay": 0.1},
    "rounded directions": {"direction_dtype": torch.float32},
}


@case(*OPTIONS_OF_STEPS)
def sharded_with_options(ranks: int, name: str) -> None:
    pair = Pair.of("KBFGS, untuned", "cnn", shard_state=True, **OPTIONS_OF_STEPS[name])
    by_closure(pair, "cnn", equal_shares(ranks))
    check_shards(pair)


@case()
def sharded_weights_and_biases_in_two_groups(ranks: int) -> None:
    """One matrix, sent by its owner, with two decays."""
    inner, twin = mlp(), mlp()

    def build(given: nn.Module, model: nn.Module, **options: Any) -> Any:
        of_shape = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        groups = [{"params": of_shape[0], "weight_decay": 0.1}, {"params": of_shape[1], "weight_decay": 0.0}]
        return FAMILY["KBFGS"].make(given, params=groups, lr=0.1, damping=0.5, shard_state=True, **options)

    model = DDP(inner)
    pair = Pair(model, build(model, inner), twin, build(twin, twin, process_group=alone()), False)
    by_closure(pair, "mlp", unequal_shares(ranks))
    check_shards(pair)


@case()
def a_cap_on_sharded_steps(ranks: int) -> None:
    """It bounds the length of the whole step, of which each rank knows a part."""
    pair = Pair.of("KBFGS", "mlp", step_cap=1e-3, shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks))
    check_shards(pair)


@case("KBFGS", "KFAC")
def sharded_warm_start(ranks: int, row: str) -> None:
    pair, sizes = Pair.of(row, "mlp", shard_state=True), equal_shares(ranks)
    x, y = data("mlp", 100)

    def sampled(model: nn.Module) -> Any:
        return None if row == "KBFGS" else lambda b: F.cross_entropy(model(b[0]), second_best(model(b[0]))).backward()

    for _ in range(2):  # the second one makes it anew
        loader = [(share(x, sizes), share(y, sizes))]
        pair.optimizer.warm_start(loader, forward=sampled(pair.model.module), progress=False)
        pair.reference.warm_start([(x, y)], forward=sampled(pair.twin), progress=False)
        by_closure(pair, "mlp", equal_shares(ranks), range(3))
    check_shards(pair)


@case("KBFGS", "KBFGS, untuned", "KFAC, untuned")
def sharded_copies_are_equal_to_the_last_bit(ranks: int, row: str) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3)))
    optimizer, member = FAMILY[row].make(model, lr=0.05, damping=0.5, T=2, shard_state=True), FAMILY[row]
    torch.manual_seed(dist.get_rank())
    for _ in range(50):
        x = torch.randn(8, 6)
        optimizer.step(
            Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3, second_best if member.samples else None)
        )
    equal_on_all_ranks(list(model.parameters()))


@case("KBFGS", "KBFGS, untuned")
def sharded_before_a_normalization(ranks: int, row: str) -> None:
    """H_G that has learned, while the normalization took its running mean, is known to its owner alone."""
    pair = Pair.of(row, "norm", shard_state=True)
    pair.model.module[1].group = dist.group.WORLD
    by_closure(pair, "norm", equal_shares(ranks), range(3))
    known = [optimizer._preconditioner.normalized.known for optimizer in (pair.optimizer, pair.reference)]
    assert [len(layers) for layers in known] == [1, 1]
    by_closure(pair, "norm", equal_shares(ranks), range(3, STEPS))
    check_shards(pair, 1e-9)


class Shift(nn.BatchNorm2d):
    """A normalization that starts to remove shifts at its third pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.momentum == 0 else x - x.mean((0, 2, 3), keepdim=True)


@case()
def sharded_before_what_becomes_a_normalization(ranks: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Identity(), nn.Conv2d(2, 4, 3), Shift(4, momentum=0), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(48, 3)).double()

    model = DDP(build(), find_unused_parameters=True)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.5, curvature_update_freq=1, shard_state=True)
    for k in range(9):
        model.module[2].momentum = 0 if k < 3 else 0.1
        x, y = data("norm", 10 * k + dist.get_rank())
        optimizer.step(Minibatch(model, F.cross_entropy, x, y))
    counts = torch.tensor([len(optimizer._preconditioner.normalized.known)])
    others = [torch.empty_like(counts) for _ in range(ranks)]
    dist.all_gather(others, counts)
    assert [int(n) for n in others] == [0] * ranks


@case("KBFGS", "KBFGS, untuned")
def weights_that_are_frozen_later(ranks: int, row: str) -> None:
    """Their biases then move along the momentum, which one rank has."""
    pair = Pair.of(row, "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(3))
    for model in (pair.model.module, pair.twin):
        model[0].weight.requires_grad_(False)
        model[0].weight.grad = None
    pair.model = DDP(pair.model.module)
    by_closure(pair, "mlp", equal_shares(ranks), range(3, 6))
    check_shards(pair)
    for model in (pair.model.module, pair.twin):
        model[0].weight.requires_grad_(True)
    pair.model = DDP(pair.model.module)
    by_closure(pair, "mlp", equal_shares(ranks), range(6, STEPS))
    check_shards(pair)


@case()
def a_batch_that_is_not_finite(ranks: int) -> None:
    """Seen on one rank: all skip it, before there is curvature and after."""
    pair = Pair.of("KBFGS", "mlp", shard_state=True)
    x, y = data("mlp", 0)
    with pytest.warns(UserWarning, match="not finite"):
        for k in range(2):
            before = copy.deepcopy(pair.model.state_dict())
            bad = torch.full_like(share(x, equal_shares(ranks)), math.nan if dist.get_rank() == ranks - 1 else 1.0)
            pair.optimizer.step(Minibatch(pair.model, F.cross_entropy, bad, share(y, equal_shares(ranks))))
            pair.reference.step(Minibatch(pair.twin, F.cross_entropy, torch.full_like(x, math.nan), y))
            assert all(torch.equal(value, before[key]) for key, value in pair.model.state_dict().items())
            by_closure(pair, "mlp", equal_shares(ranks), range(5 * k, 5 * k + 5))
    check_shards(pair)


@case()
def sharded_layers_that_are_added_later(ranks: int) -> None:
    """They find owners; those of others stay."""
    pair = Pair.of("KBFGS", "mlp", shard_state=True)
    models = (pair.model.module, pair.twin)
    torch.manual_seed(1)
    new = [nn.Linear(3, 3).double() for _ in models]
    new[1].load_state_dict(new[0].state_dict())
    by_closure(pair, "mlp", equal_shares(ranks), range(3))
    for model, layer, optimizer in zip(models, new, (pair.optimizer, pair.reference), strict=True):
        model.append(layer)
        optimizer.add_param_group({"params": layer.parameters()})
    pair.model = DDP(pair.model.module)
    by_closure(pair, "mlp", equal_shares(ranks), range(3, STEPS))
    check_shards(pair)


# ------------------------------------------------------------------ what is sent and kept, where state is divided


def kept_bytes(optimizer: Any) -> int:
    return sum(t.numel() * t.element_size() for t in states(optimizer))


@case("KBFGS", "KFAC", "KBFGS, untuned")
def steps_and_directions_are_sent_once(ranks: int, row: str) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 40), nn.LayerNorm(40)))
    member = FAMILY[row]
    optimizer = member.make(model, lr=0.01, damping=1.0, T=2, shard_state=True, **member.taken(inverse_update_freq=2))
    of_it, sent = optimizer._passes.ranks, []
    for k in range(4):
        before = of_it.bytes_sent, of_it.messages
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, nn.MSELoss(), x, x, (lambda output, y, g: y) if member.samples else None))
        sent.append((of_it.bytes_sent - before[0], of_it.messages - before[1]))
    given = torch.tensor(sent[2])
    dist.all_reduce(given)
    in_layers = sum(p.numel() for p in model.parameters()) - 80
    owners = min(ranks, 2)
    assert int(given[0]) == 4 * in_layers, (sent, in_layers)  # of all ranks together: each step once
    assert sent[2][1] == owners, sent  # a message of each owner
    if row != "KFAC":  # beside what pools two passes, s of each owner
        assert sent[3][1] == 2 * owners + 3, sent


@case("KBFGS", "KBFGSL", "KFAC")
def state_of_a_rank(ranks: int, row: str) -> None:
    """Of equal layers each rank has its share, as the plan says."""
    torch.manual_seed(0)
    layers = [nn.Linear(31, 31) for _ in range(2 * ranks)]
    alone_ = copy.deepcopy(nn.Sequential(*layers))
    model, member = DDP(nn.Sequential(*layers)), FAMILY[row]
    kept = []
    for net, options in ((model, {"shard_state": True}), (alone_, {"process_group": alone()})):
        optimizer = member.make(net, lr=0.01, damping=1.0, **options)
        x = torch.randn(8, 31)
        for _ in range(2):
            optimizer.step(Minibatch(net, nn.MSELoss(), x, x, (lambda output, y, g: y) if member.samples else None))
        kept.append(kept_bytes(optimizer))
        if "shard_state" in options:
            assert f"{1 / ranks:.1%} on the fullest of {ranks} processes" in repr(optimizer)
    marks = 4 * (2 * ranks - 2)
    assert (kept[0] - marks) * ranks == kept[1], kept


@case()
def what_a_rank_can_tell(ranks: int) -> None:
    """Of a layer that another one owns: nothing, as before there is curvature."""
    pair = Pair.of("KBFGS", "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(2))
    layers = [module for module in pair.model.module if isinstance(module, nn.Linear)]
    for layer, told in zip(layers, pair.optimizer.diagnostics(), strict=True):
        is_here = not is_mark(pair.optimizer.state[layer.weight])
        assert (told.A is not None) is is_here
        assert (pair.optimizer.inverses(layer.weight) is not None) is is_here


@case()
def sharded_loop_of_any_optimizer(ranks: int) -> None:
    """With micro-batches; the last one alone sends gradients."""
    pair, sizes = Pair.of("OnePassKBFGS", "cnn", shard_state=True), unequal_shares(ranks)
    for k in range(STEPS):
        x, y = (share(t, sizes).chunk(2) for t in data("cnn", k, sum(sizes)))
        for number, (x_, y_) in enumerate(zip(x, y, strict=True), 1):
            with nullcontext() if number == len(x) else pair.model.no_sync():
                scaled_loss(sizes)(pair.model(x_), y_).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    reference_steps(pair, "cnn")
    check_shards(pair)


@case()
def sharded_rank_without_data(ranks: int) -> None:
    for row in ("KBFGS", "OnePassKBFGS"):
        pair = Pair.of(row, "mlp", shard_state=True)
        by_closure(pair, "mlp", one_without_data(ranks))
        check_shards(pair)


@dataclass(frozen=True)
class Untold(FisherAction):
    """A rule that chooses directions, and does not say how many."""

    num_directions = 0


@case()
def rules_that_do_not_say_how_many_directions_they_choose(ranks: int) -> None:
    recipe = replace(OnePassKBFGS.recipe, output_inverse=Untold())
    with pytest.raises(ValueError, match="OnePassKBFGS looks at Γ.*Untold.*num_directions.*shard_state=False"):
        OnePassKBFGS(DDP(mlp()), recipe=recipe, shard_state=True)


# ------------------------------------------------------------------ checkpoints of a divided state


def continued(pair: Pair, model: nn.Module, optimizer: Any) -> None:
    """Another pair's half of the way, beside the twin's."""
    other = Pair(model, optimizer, pair.twin, pair.reference, pair.samples)
    by_closure(other, "mlp", equal_shares(dist.get_world_size()), range(5, STEPS))
    for p, twin in zip(parameters(optimizer), parameters(pair.reference), strict=True):
        same(p, twin)


ROWS_SAVED = ("KBFGS", "KBFGSL, untuned", "KFAC, untuned")


@case(*ROWS_SAVED)
def the_whole_state_on_one_rank(ranks: int, row: str) -> None:
    """It is that of one process, and loads into one, into copies, and into shards again."""
    pair = Pair.of(row, "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(5))
    given = [pair.optimizer.gather_state(ranks - 1)]
    assert (given[0] is None) is (dist.get_rank() != ranks - 1)
    dist.broadcast_object_list(given, ranks - 1)
    (whole,) = given
    want = pair.reference.state_dict()["state"]
    assert {key: set(value) for key, value in whole["state"].items() if value} == {
        key: set(value) for key, value in want.items() if value
    }
    for key, state in want.items():
        for name in state:
            same(whole["state"][key][name], state[name])
    saved = copy.deepcopy(pair.model.module.state_dict())
    for options in ({"shard_state": True}, {}):
        inner = NETS["mlp"][0]()
        inner.load_state_dict(saved)
        model = DDP(inner)
        optimizer = FAMILY[row].make(model, lr=0.1, damping=0.5, **options)
        optimizer.load_state_dict(copy.deepcopy(whole))
        twin = NETS["mlp"][0]()
        twin.load_state_dict(saved)
        reference = FAMILY[row].make(twin, lr=0.1, damping=0.5, process_group=alone())
        reference.load_state_dict(copy.deepcopy(whole))
        continued(Pair(None, None, twin, reference, pair.samples), model, optimizer)
        if options:
            check_shards(Pair(model, optimizer, twin, reference, pair.samples))


@case()
def copies_give_their_state_on_one_rank_too(ranks: int) -> None:
    pair = Pair.of("KBFGS", "mlp")
    by_closure(pair, "mlp", equal_shares(ranks), range(2))
    given = pair.optimizer.gather_state()
    assert (given is None) is (dist.get_rank() != 0)
    assert pair.reference.gather_state() is not None or dist.get_rank() != 0


@case()
def a_part_is_refused(ranks: int) -> None:
    """By one process, by copies, and by a rank that owns other layers; nothing has moved then."""
    pair = Pair.of("KBFGS", "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(2))
    parts = [None] * ranks
    dist.all_gather_object(parts, pair.optimizer.state_dict())
    for optimizer, given in (
        (pair.reference, parts[dist.get_rank()]),
        (Pair.of("KBFGS", "mlp").optimizer, parts[dist.get_rank()]),
        (pair.optimizer, parts[(dist.get_rank() + 1) % ranks]),
    ):
        owned = [b for b in optimizer._blocks() if optimizer._preconditioner.owners.owns(b.layer)]
        if not owned:
            continue
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"of [035].*torch\.distributed\.checkpoint.*gather_state"):
            optimizer.load_state_dict(given)
        after = optimizer.state_dict()
        for key, state in before["state"].items():
            assert all(torch.equal(value, after["state"][key][n]) for n, value in state.items())
    pair.optimizer.load_state_dict(copy.deepcopy(parts[dist.get_rank()]))  # its own
    by_closure(pair, "mlp", equal_shares(ranks), range(2, STEPS))
    check_shards(pair)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def parts_for_dcp(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Model and optimizer as torch.distributed.checkpoint saves them, and reads into them."""
    return {
        "model": get_model_state_dict(model, options=FLAT),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def read_by_dcp(model: nn.Module, optimizer: Any, folder: str, in_one: bool, **planned: bool) -> None:
    state = parts_for_dcp(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=in_one, planner=DefaultLoadPlanner(**planned))
    set_model_state_dict(model, state["model"], options=FLAT)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


def in_a_folder_of_all(run: Callable[[str], None]) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    try:
        run(str(folder[0]))
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]))


@case(*ROWS_SAVED)
def parts_through_dcp(ranks: int, row: str) -> None:
    """From shards to one process, to copies and to shards again; and from one process to shards."""
    pair = Pair.of(row, "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(5))
    whole = copy.deepcopy((pair.twin.state_dict(), pair.reference.state_dict()))

    def fresh(**options: Any) -> Pair:
        """Another pair, whose twin is where the first one's was."""
        new = Pair.of(row, "mlp", **options)
        for p in new.model.parameters():
            p.detach().zero_()
        new.twin.load_state_dict(whole[0])
        new.reference.load_state_dict(copy.deepcopy(whole[1]))
        return new

    def from_shards(folder: str) -> None:
        dcp.save(parts_for_dcp(pair.model, pair.optimizer), checkpoint_id=folder)
        for options in ({"shard_state": True}, {}):
            new = fresh(**options)
            read_by_dcp(new.model, new.optimizer, folder, in_one=False)
            by_closure(new, "mlp", equal_shares(ranks), range(5, STEPS))
            check_shards(new) if options else new.check()
        model = NETS["mlp"][0]()
        optimizer = FAMILY[row].make(model, lr=0.1, damping=0.5, process_group=alone())
        read_by_dcp(model, optimizer, folder, in_one=True)
        assert_equal(model, optimizer, pair.twin, pair.reference)

    def from_one(folder: str) -> None:
        if dist.get_rank() == 0:
            dcp.save(parts_for_dcp(pair.twin, pair.reference), checkpoint_id=folder, no_dist=True)
        dist.barrier()
        new = fresh(shard_state=True)
        read_by_dcp(new.model, new.optimizer, folder, in_one=False)
        by_closure(new, "mlp", equal_shares(ranks), range(5, STEPS))
        check_shards(new)

    in_a_folder_of_all(from_shards)
    in_a_folder_of_all(from_one)


@case()
def between_other_numbers_of_ranks_through_dcp(ranks: int) -> None:
    """The second half of the ranks save, and all load."""
    half = range(ranks // 2, ranks)
    group = dist.new_group(half)
    pair = Pair.of("KBFGS", "mlp", shard_state=True)
    by_closure(pair, "mlp", equal_shares(ranks), range(5))
    whole = pair.reference.state_dict()

    def run(folder: str) -> None:
        if dist.get_rank() in half:
            few = NETS["mlp"][0]()
            few.load_state_dict(pair.twin.state_dict())
            model = DDP(few, process_group=group)
            optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.5, curvature_update_freq=1, shard_state=True)
            optimizer.load_state_dict(copy.deepcopy(whole))
            given = optimizer.gather_state(len(half) - 1)
            assert (given is not None) is (dist.get_rank() == half[-1])
            dcp.save(parts_for_dcp(model, optimizer), checkpoint_id=folder, process_group=group)
        dist.barrier()
        read_by_dcp(pair.model, pair.optimizer, folder, in_one=False)
        by_closure(pair, "mlp", equal_shares(ranks), range(5, STEPS))
        check_shards(pair)

    in_a_folder_of_all(run)


class Branches(nn.Module):
    """Of two layers one is used, until the other is wanted too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.both = False

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden + self.second(x) if self.both else hidden))


NETS["branches"] = lambda: Branches().double(), (6,)


@case("KBFGS", "KBFGS, untuned")
def a_layer_that_wakes_up_after_resuming(ranks: int, row: str) -> None:
    """It has no state yet, on no rank, which a checkpoint's planner has to be told."""
    options: dict[str, Any] = {"shard_state": True, "ddp": {"find_unused_parameters": True}}
    pair, new = Pair.of(row, "branches", **options), Pair.of(row, "branches", **copy.deepcopy(options))
    by_closure(pair, "branches", equal_shares(ranks), range(5))
    new.twin, new.reference = pair.twin, pair.reference

    def run(folder: str) -> None:
        dcp.save(parts_for_dcp(pair.model, pair.optimizer), checkpoint_id=folder)
        read_by_dcp(new.model, new.optimizer, folder, in_one=False, allow_partial_load=True)

    in_a_folder_of_all(run)
    by_closure(new, "branches", equal_shares(ranks), range(5, 7))
    for model in (new.model.module, new.twin):
        model.both = True
    by_closure(new, "branches", equal_shares(ranks), range(7, STEPS))
    check_shards(new)
