"""The processes that train one model together, with one copy of it and a share of the data each."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from kfqn_ext.optim.passes.ranks.bucket import Bucket
from kfqn_ext.optim.passes.ranks.divided import group_of
from kfqn_ext.optim.passes.ranks.letters import Letters, in_world
from kfqn_ext.optim.passes.ranks.pool import Pool
from kfqn_ext.optim.passes.ranks.rows import Rows

_APART = 0x9E3779B97F4A7C15 >> 1


def seed_of(rank: int, seed: int) -> int:
    """The seed that a rank samples targets with, where all have drawn the same: each samples for data of its own."""
    return (seed + rank * _APART) % 2**63


class Ranks(Protocol):
    """What they send each other.

    Everything but ``alone`` is a collective: all ranks call it, in the same steps and in the same order.

    Attributes:
        several: Whether there is more than one.
        rank: Which one this is.
        size: How many there are.
        is_chosen: Whether somebody has said which ranks train together.
        rows: Moves rows of weights, where a rank has rows alone; None where it has a copy of the model.
    """

    several: bool
    rank: int
    size: int
    is_chosen: bool
    rows: Rows | None

    @property
    def pool(self) -> Pool | None:
        """Makes of what a rank has measured what one process with all data would have; None in one process."""

    def in_step(self, loader: Iterable[Any], like: Tensor) -> Iterator[tuple[Any, bool]]:
        """The batches of a loader, each with whether it counts.

        Where the model is divided a forward pass is a collective: a rank that has run out runs its last batch again.

        Raises:
            ValueError: On all ranks, if the model is divided, and some of them have no batch at all.
        """

    def spread(self, tensors: Sequence[Tensor], senders: Sequence[int]) -> list[Tensor]:
        """Give every rank each tensor as its sender has it. Of the others', only form and dtype count."""

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number, or of a tensor, over ranks."""

    def gathered(self, part: Any, receiver: int) -> list[Any] | None:
        """What each rank has given, for one of them; None for the others."""

    def mean(self, loss: Tensor) -> Tensor:
        """The mean of a loss over ranks, []."""

    def check_gradient(self, norm: Tensor) -> None:
        """Raise a RuntimeError on all ranks where their gradients differ; once, until ``check_again``."""

    def check_again(self) -> None:
        """Compare gradients once more: a state was loaded."""

    def alone(self) -> Any:
        """A context in which the wrapped model's passes are of this rank alone."""


class OneProcess:
    """Nothing to pool."""

    several, rank, size = False, 0, 1
    rows: Rows | None = None
    pool: Pool | None = None

    def __init__(self, is_chosen: bool = False) -> None:
        """One process for itself, because somebody said so or for there is no other."""
        self.is_chosen = is_chosen

    def in_step(self, loader: Iterable[Any], like: Tensor) -> Iterator[tuple[Any, bool]]:  # noqa: D102
        return ((batch, True) for batch in loader)

    def spread(self, tensors: Sequence[Tensor], senders: Sequence[int]) -> list[Tensor]:  # noqa: D102
        return list(tensors)

    def total(self, value: Tensor) -> Tensor:  # noqa: D102
        return value

    def gathered(self, part: Any, receiver: int) -> list[Any] | None:  # noqa: D102
        return [part]

    def mean(self, loss: Tensor) -> Tensor:  # noqa: D102
        return loss

    def check_gradient(self, norm: Tensor) -> None:  # noqa: D102
        pass

    def check_again(self) -> None:  # noqa: D102
        pass

    def alone(self) -> Any:  # noqa: D102
        return nullcontext()


class SeveralProcesses:
    """The processes of a group, whose copies of the model get the same gradient, or which share one model.

    Attributes:
        rows: Moves rows of weights, where they share it.
        messages: How many collectives there were.
        bytes_sent: How much this rank gave to them.
    """

    several, is_chosen = True, True

    def __init__(
        self,
        group: distributed.ProcessGroup | None,
        wrappers: Sequence[DistributedDataParallel] = (),
        rows: Rows | None = None,
    ) -> None:
        """Train together with the processes of a group; None for all.

        Args:
            group: The group.
            wrappers: Whose ``forward`` the passes run.
            rows: Moves rows of weights, where each process has rows alone.
        """
        self.rows = rows
        self._group, self._wrappers = group, list(wrappers)
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._gradient_is_known = rows is not None  # one gradient, of which each has rows
        self.messages = self.bytes_sent = 0

    @property
    def pool(self) -> Pool:
        """What they have measured, together."""
        return Pool(self.summed, self.size, has_rows=self.rows is not None)

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of tensors over ranks; these may be overwritten."""
        self._check_wrappers()
        bucket = Bucket(self._group)
        for tensor in tensors:
            bucket.add(tensor)
        sums = bucket.sums()
        self._count(bucket)
        return sums

    def in_step(self, loader: Iterable[Any], like: Tensor) -> Iterator[tuple[Any, bool]]:  # noqa: D102
        batches = ((batch, True) for batch in loader)
        return batches if self.rows is None else self._filled_up(batches, like)

    def _filled_up(self, batches: Iterator[tuple[Any, bool]], like: Tensor) -> Iterator[tuple[Any, bool]]:
        last, none = None, (None, False)
        while True:
            batch, counts = next(batches, none)
            with_more, without_any = self.total(like.new_tensor([counts, not counts and last is None])).tolist()
            if with_more == 0:
                return
            if without_any > 0:
                raise ValueError(
                    f"warm_start: the loaders of {without_any:.0f} of {self.size} processes have no batch. The forward "
                    "pass of a model of fully_shard is run by all together: give each process one batch at least. "
                    "Their number may differ."
                )
            last = (batch,) if counts else last
            assert last is not None
            yield last[0], counts

    def _check_wrappers(self) -> None:
        if any(wrapper._join_config.enable for wrapper in self._wrappers):
            raise RuntimeError(
                "Inside DistributedDataParallel.join() a rank that has run out of data only answers the wrapper's own "
                "messages, and would leave those about curvature unanswered. Give all ranks as many batches "
                "(DistributedSampler does), or an empty batch with a loss of zero."
            )

    def _count(self, sent: Bucket | Letters) -> None:
        self.messages += sent.messages
        self.bytes_sent += sent.bytes_sent

    def spread(self, tensors: Sequence[Tensor], senders: Sequence[int]) -> list[Tensor]:  # noqa: D102
        letters = Letters(self._group)
        for tensor, sender in zip(tensors, senders, strict=True):
            letters.add(tensor, sender)
        found = letters.delivered()
        self._count(letters)
        return found

    def total(self, value: Tensor) -> Tensor:  # noqa: D102
        return self.summed([value.clone()])[0]

    def gathered(self, part: Any, receiver: int) -> list[Any] | None:  # noqa: D102
        parts = [None] * self.size if self.rank == receiver else None
        distributed.gather_object(part, parts, dst=in_world(receiver, self._group), group=self._group)
        return parts

    def mean(self, loss: Tensor) -> Tensor:  # noqa: D102
        return self.total(loss / self.size)

    def check_gradient(self, norm: Tensor) -> None:  # noqa: D102
        if self._gradient_is_known:
            return
        norms = [torch.zeros_like(norm) for _ in range(self.size)]
        distributed.all_gather(norms, norm.contiguous(), group=self._group)
        found = [float(n) for n in norms]
        if max(found) > (1 + 1e-5) * min(found):
            raise RuntimeError(
                f"The ranks have different gradients, of norms {', '.join(f'{n:.6g}' for n in found)}: their copies of "
                "the model would drift apart. Average gradients before step(): train the model inside "
                "DistributedDataParallel, with no_sync() around all micro-batches but the last."
            )
        self._gradient_is_known = True

    def check_again(self) -> None:  # noqa: D102
        self._gradient_is_known = self.rows is not None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Neither gradients nor buffers are sent, and the next pass sends its buffers as ever."""
        before = [wrapper.require_forward_param_sync for wrapper in self._wrappers]
        with ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.no_sync())
                wrapper.require_forward_param_sync = False
            try:
                yield
            finally:
                for wrapper, sync in zip(self._wrappers, before, strict=True):
                    wrapper.require_forward_param_sync = sync


def _check_group(given: distributed.ProcessGroup | None, of_shards: distributed.ProcessGroup) -> None:
    ranks = distributed.get_process_group_ranks(of_shards)
    if given is not None and distributed.get_process_group_ranks(given) != ranks:
        raise ValueError(
            f"process_group is not that of the {len(ranks)} processes that fully_shard has divided the model among. "
            "Leave it out: the model says it."
        )


def ranks_of(
    model: nn.Module, group: distributed.ProcessGroup | None
) -> tuple[nn.Module, OneProcess | SeveralProcesses]:
    """Who trains a model, and the model inside a wrapper.

    Args:
        model: A model, a ``DistributedDataParallel`` around one, or a module that holds one.
        group: The group of processes, where neither a wrapper nor ``fully_shard`` says it.

    Returns:
        The model without a wrapper around it, and the ranks.

    Raises:
        UnsupportedLayerError: If processes share the model in a way in which layers can't be measured.
        ValueError: If a group is given that is not the one that shares the model.
    """
    of_shards = group_of(model)
    if of_shards is not None:
        _check_group(group, of_shards)
        return model, SeveralProcesses(of_shards, rows=Rows(of_shards))
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if group is None and not wrappers:
        return inner, OneProcess()
    group = wrappers[0].process_group if group is None else group
    if distributed.get_world_size(group) == 1:
        return inner, OneProcess(is_chosen=True)
    return inner, SeveralProcesses(group, wrappers)
