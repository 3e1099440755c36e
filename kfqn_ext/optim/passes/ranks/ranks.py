"""The processes that train one model together, with one copy of it and a share of the data each."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from kfqn_ext.extensions import FisherProduct, InputMoments, LayerMoments, with_outputs
from kfqn_ext.extensions.pooling import DATA, SQUARES, Counted, Counts, means_of
from kfqn_ext.linalg import full_precision
from kfqn_ext.optim.inverses import Measured
from kfqn_ext.optim.passes.measurement import Results
from kfqn_ext.optim.passes.ranks.bucket import Bucket, beside
from kfqn_ext.optim.passes.ranks.divided import group_of
from kfqn_ext.optim.passes.ranks.letters import Letters, in_world
from kfqn_ext.optim.passes.ranks.rows import Rows
from kfqn_ext.optim.passes.ranks.weights import Share, Table, Weight

Chosen = tuple[Tensor | None, tuple[Tensor, Tensor] | None]
"""s for A, and s for Γ with what is kept with Γ s; None for none, or for what the pass has looked at itself."""
Directions = Callable[[Results], Mapping[nn.Module, Chosen]]
"""What a pass has shown of all ↦ the directions of each layer."""


class _Part(NamedTuple):
    """What this rank has of a quantity."""

    module: nn.Module
    kind: Any
    own: Any


class Ranks(Protocol):
    """Makes of what a rank has found what one process with the data of all would have found.

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

    def pooled(
        self,
        results: Results,
        table: Table,
        said: Sequence[float] = (),
        flags: Sequence[Tensor] = (),
        without: Collection[str] = (),
    ) -> tuple[Results, list[float]]:
        """Pool the means that a pass, or a warm start, has found; waits for the device, once.

        Args:
            results: With an entry for every layer and quantity that was asked for, of no data where there was none. Its
                means are overwritten.
            table: How much a rank counts.
            said: Numbers that are summed in the same message.
            flags: The same for numbers that the device has, each [].
            without: Fields that nobody reads.

        Returns:
            Results with the data of all, of layers that somebody saw; the sums.
        """

    def repeated(
        self,
        results: Results,
        first: Results,
        table: Table,
        said: Sequence[float],
        flags: Sequence[Tensor],
        without: Collection[str],
    ) -> tuple[Results, Tensor]:
        """Pool the means of a pass over the data of another, whose counts all know: nothing waits for the device.

        Args:
            results: As above.
            first: What the other pass has shown of all.
            table: How much a rank counts.
            said: Numbers that are summed in the same message.
            flags: The same for numbers that the device has, each [].
            without: Fields that nobody reads.

        Returns:
            Results with the data of all, of layers that somebody saw in the first pass; the sums, and after them one if
            some layer saw other counts than then.
        """

    def probed(self, own: Results, whole: Results, table: Table, directions: Directions) -> Results:
        """Look at A, and Γ, in directions that depend on all, or that others choose; what was kept for it is let go."""

    def outputs(self, whole: Results) -> Results:
        """Add h̄ = W ā from the ā of all, where a rank has rows of W alone.

        That is W as it is kept: passes may run with a rounded one, of which a difference of two h̄ would tell.
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

    def __init__(self, is_chosen: bool = False) -> None:
        """One process for itself, because somebody said so or for there is no other."""
        self.is_chosen = is_chosen

    def pooled(  # noqa: D102
        self,
        results: Results,
        table: Table,
        said: Sequence[float] = (),
        flags: Sequence[Tensor] = (),
        without: Collection[str] = (),
    ) -> tuple[Results, list[float]]:
        return results, [*said, *map(float, flags)]

    def repeated(  # noqa: D102
        self,
        results: Results,
        first: Results,
        table: Table,
        said: Sequence[float],
        flags: Sequence[Tensor],
        without: Collection[str],
    ) -> tuple[Results, Tensor]:
        return results, torch.tensor([*said, *map(float, flags), 0.0], device="cpu")

    def probed(self, own: Results, whole: Results, table: Table, directions: Directions) -> Results:  # noqa: D102
        return whole

    def outputs(self, whole: Results) -> Results:  # noqa: D102
        return whole

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

    def pooled(  # noqa: D102
        self,
        results: Results,
        table: Table,
        said: Sequence[float] = (),
        flags: Sequence[Tensor] = (),
        without: Collection[str] = (),
    ) -> tuple[Results, list[float]]:
        parts, whole = _parts(results), results.like({})
        if parts:
            sums, numbers = self._summed(parts, table, said, flags, without)
            read = numbers.double().tolist()  # the one wait
            counts = [_counts(data, terms) for data, terms in zip(read[::2], read[1::2], strict=False)][: len(parts)]
            whole, said = _whole(results, parts, sums, counts, table), read[2 * len(parts) :]
        return whole, list(said)

    def repeated(  # noqa: D102
        self,
        results: Results,
        first: Results,
        table: Table,
        said: Sequence[float],
        flags: Sequence[Tensor],
        without: Collection[str],
    ) -> tuple[Results, Tensor]:
        known = [(first.get(part.module, Measured()).get(part.kind), part) for part in _parts(results)]
        parts = [part for of_all, part in known if of_all is not None]  # what nobody saw then is not sent
        counts = [Counts(q.num_data, q.num_locations) for q, _ in known if q is not None]
        if not parts:
            return results.like({}), torch.zeros((), device="cpu")
        sums, numbers = self._summed(parts, table, said, flags, without)
        expected = beside([n for count in counts for n in _numbers_of(count)], numbers)
        apart = (numbers[: len(expected)] - expected).abs() > 0.5 + 1e-6 * expected  # of integers, and rounded ones
        told = torch.cat((numbers[len(expected) :], apart.any().to(numbers).view(1)))
        return _whole(results, parts, sums, counts, table), told

    def _summed(
        self,
        parts: Sequence[_Part],
        table: Table,
        said: Sequence[float],
        flags: Sequence[Tensor],
        without: Collection[str],
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Sums over ranks of weighed means, by their names; those of N and N |T| of each part, and of what is said."""
        self._check_wrappers()
        bucket, sent = Bucket(self._group), []
        for _, _, own in parts:
            means = {name: mean for name, mean in means_of(own).items() if name not in without}
            weighed = {
                name: getattr(own, name).mul_(_weight(table[mean][0], own, self.size)) for name, mean in means.items()
            }
            sent.append({name: bucket.add(value) for name, value in weighed.items()})
        like = next(iter(weighed.values()))
        numbers = beside([*(n for part in parts for n in _numbers_of(part.own)), *said], like)
        told = bucket.add(torch.cat((numbers, *(flag.to(like, non_blocking=True).view(1) for flag in flags))))
        found = self._sent(bucket)
        return [{name: found[n] for name, n in names.items()} for names in sent], found[told]

    def probed(self, own: Results, whole: Results, table: Table, directions: Directions) -> Results:  # noqa: D102
        chosen = directions(whole)

        def product(part: _Part, s: Tensor, rule: tuple[Weight, Share]) -> Tensor:
            """A s or Γ s of this rank's data, as a part of that of all."""
            mine = own[part.module][part.kind]
            if mine.operator is None or mine.num_data == 0:
                return torch.zeros_like(s)
            with full_precision():
                product: Tensor = mine.operator.times(s)
            return product * (rule[0](mine, self.size) * rule[1](part.own))

        def look(part: _Part) -> tuple[Any, dict[str, Tensor]]:
            of_all, (s, at_outputs) = part.own, chosen.get(part.module, (None, None))
            if isinstance(of_all, InputMoments):
                return replace(of_all, operator=None, s=s), {} if s is None else {"A_s": product(part, s, table[DATA])}
            if isinstance(of_all, FisherProduct) and at_outputs is not None:
                s, kept = at_outputs
                looked = replace(of_all, operator=None, s=s, kept=kept)
                return looked, {"Gamma_s": product(part, s, table[SQUARES])}
            return of_all, {}

        return self._with_sums(whole, look)

    def outputs(self, whole: Results) -> Results:  # noqa: D102
        return whole if self.rows is None else self._with_sums(whole, lambda part: (part.own, {}))

    def _with_sums(self, whole: Results, look: Callable[[_Part], tuple[Any, dict[str, Tensor]]]) -> Results:
        """Results with h̄ = W ā, and with fields that are sums over ranks of what ``look`` finds on each."""
        bucket, new, sent = Bucket(self._group), {m: dict(measured.items()) for m, measured in whole.items()}, []
        for part in _parts(whole):
            (module, kind, _), (found, sums) = part, look(part)
            new[module][kind] = found = with_outputs(module, found)
            if self.rows is not None and isinstance(found, LayerMoments):
                sums = {**sums, "h_bar": found.h_bar}  # of the rows of W that are here
            sent += [(module, kind, name, bucket.add(value)) for name, value in sums.items()]
        arrived = self._sent(bucket)
        for module, kind, name, n in sent:
            new[module][kind] = replace(new[module][kind], **{name: arrived[n]})
        return whole.like({module: Measured(quantities) for module, quantities in new.items()})

    def _check_wrappers(self) -> None:
        if any(wrapper._join_config.enable for wrapper in self._wrappers):
            raise RuntimeError(
                "Inside DistributedDataParallel.join() a rank that has run out of data only answers the wrapper's own "
                "messages, and would leave those about curvature unanswered. Give all ranks as many batches "
                "(DistributedSampler does), or an empty batch with a loss of zero."
            )

    def _sent(self, bucket: Bucket) -> list[Tensor]:
        sums = bucket.sums()
        self._count(bucket)
        return sums

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
        bucket = Bucket(self._group)
        bucket.add(value.clone())
        return self._sent(bucket)[0]

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


def _parts(results: Results) -> list[_Part]:
    return [_Part(module, kind, own) for module, measured in results.items() for kind, own in measured.items()]


def _whole(
    results: Results,
    parts: Sequence[_Part],
    sums: Sequence[Mapping[str, Tensor]],
    counts: Sequence[Counts | None],
    table: Table,
) -> Results:
    """Results of which somebody had data, from sums over ranks."""
    whole: dict[nn.Module, dict[Any, Any]] = {}
    for (module, kind, own), found, of_all in zip(parts, sums, counts, strict=True):
        if of_all is not None:
            means = means_of(own)
            pooled = {name: value.mul_(table[means[name]][1](of_all)) for name, value in found.items()}
            whole.setdefault(module, {})[kind] = replace(own, **vars(of_all), **pooled)
    return results.like({module: Measured(quantities) for module, quantities in whole.items()})


def _numbers_of(counts: Counted) -> tuple[float, float]:
    """N and N |T|, which add up over ranks."""
    return counts.num_data, counts.num_data * counts.num_locations


def _counts(data: float, terms: float) -> Counts | None:
    return Counts(round(data), _whole_if_whole(terms / data)) if data > 0 else None


def _weight(weight: Weight, part: Counted, size: int) -> float:
    return weight(part, size) if part.num_data > 0 else 0.0


def _whole_if_whole(number: float) -> float:
    """|T| as an integer where it is one, as one process counts it."""
    return int(number) if number == int(number) else number


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
