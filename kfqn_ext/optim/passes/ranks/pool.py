"""What ranks have measured of their shares of a batch, as one process would have measured it of the whole."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfqn_ext.extensions import FisherProduct, InputMoments, LayerMoments, with_outputs
from kfqn_ext.extensions.pooling import DATA, SQUARES, Counted, Counts, means_of
from kfqn_ext.linalg import full_precision
from kfqn_ext.optim.inverses import Measured
from kfqn_ext.optim.inverses.base import Direction
from kfqn_ext.optim.passes.measurement import Results
from kfqn_ext.optim.passes.ranks.bucket import beside
from kfqn_ext.optim.passes.ranks.weights import Share, Table, Weight

Chosen = tuple[Direction | None, Direction | None]
"""s for A and what is kept with A s, and the same for Γ; None for none, or for what the pass has looked at itself."""
Directions = Callable[[Results], Mapping[nn.Module, Chosen]]
"""What a pass has shown of all ↦ the directions of each layer."""


class _Part(NamedTuple):
    """What this rank has of a quantity."""

    module: nn.Module
    kind: Any
    own: Any


class Pool:
    """Joins the results of all ranks; every method is a collective, which all call in the same order."""

    def __init__(self, summed: Callable[[Sequence[Tensor]], list[Tensor]], size: int, has_rows: bool) -> None:
        """Join by sums.

        Args:
            summed: The sums of tensors over ranks; these may be overwritten.
            size: How many ranks there are.
            has_rows: Whether each has rows of weights alone.
        """
        self._summed, self._size, self._has_rows = summed, size, has_rows

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
        parts, whole = _parts(results), results.like({})
        if parts:
            sums, numbers = self._pooled(parts, table, said, flags, without)
            read, n = numbers.double().tolist(), 2 * len(parts)  # the one wait
            counts = [_counts(data, terms) for data, terms in zip(read[0:n:2], read[1:n:2], strict=True)]
            whole, said = _whole(results, parts, sums, counts, table), read[n:]
        return whole, list(said)

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
        known = [(first.get(part.module, Measured()).get(part.kind), part) for part in _parts(results)]
        parts = [part for of_all, part in known if of_all is not None]  # what nobody saw then is not sent
        counts = [Counts(q.num_data, q.num_locations) for q, _ in known if q is not None]
        if not parts:
            return results.like({}), torch.zeros(len(said) + len(flags) + 1, device="cpu")
        sums, numbers = self._pooled(parts, table, said, flags, without)
        expected = beside([n for count in counts for n in _numbers_of(count)], numbers)
        apart = (numbers[: len(expected)] - expected).abs() > 0.5 + 1e-6 * expected  # of integers, and rounded ones
        told = torch.cat((numbers[len(expected) :], apart.any().to(numbers).view(1)))
        return _whole(results, parts, sums, counts, table), told

    def _pooled(
        self,
        parts: Sequence[_Part],
        table: Table,
        said: Sequence[float],
        flags: Sequence[Tensor],
        without: Collection[str],
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Sums over ranks of weighed means, by their names; those of N and N |T| of each part, and of what is said."""
        tensors: list[Tensor] = []
        sent = []
        for _, _, own in parts:
            means = {name: mean for name, mean in means_of(own).items() if name not in without}
            weighed = {
                name: getattr(own, name).mul_(_weight(table[mean][0], own, self._size)) for name, mean in means.items()
            }
            sent.append({name: len(tensors) + n for n, name in enumerate(weighed)})
            tensors += weighed.values()
        like = next(iter(weighed.values()))
        numbers = beside([*(n for part in parts for n in _numbers_of(part.own)), *said], like)
        told = torch.cat((numbers, *(flag.to(like, non_blocking=True).view(1) for flag in flags)))
        *found, told = self._summed([*tensors, told])
        return [{name: found[n] for name, n in names.items()} for names in sent], told

    def probed(self, own: Results, whole: Results, table: Table, directions: Directions) -> Results:
        """Look at A, and Γ, in directions that depend on all, or that others choose; what was kept for it is let go."""
        chosen = directions(whole)

        def product(part: _Part, s: Tensor, rule: tuple[Weight, Share]) -> Tensor:
            """A s or Γ s of this rank's data, as a part of that of all."""
            mine = own[part.module][part.kind]
            if mine.operator is None or mine.num_data == 0:
                return torch.zeros_like(s)
            with full_precision():
                product: Tensor = mine.operator.times(s)
            return product * (rule[0](mine, self._size) * rule[1](part.own))

        def look(part: _Part) -> tuple[Any, dict[str, Tensor]]:
            of_all, (at_inputs, at_outputs) = part.own, chosen[part.module]
            if isinstance(of_all, InputMoments):
                if at_inputs is None:
                    return replace(of_all, operator=None, s=None), {}
                s, kept = at_inputs
                return replace(of_all, operator=None, s=s, kept=kept), {"A_s": product(part, s, table[DATA])}
            if not isinstance(of_all, FisherProduct) or at_outputs is None:
                return of_all, {}
            s, kept = at_outputs
            return replace(of_all, operator=None, s=s, kept=kept), {"Gamma_s": product(part, s, table[SQUARES])}

        return self._with_sums(whole, look)

    def outputs(self, whole: Results) -> Results:
        """Add h̄ = W ā from the ā of all, where a rank has rows of W alone.

        That is W as it is kept: passes may run with a rounded one, of which a difference of two h̄ would tell.
        """
        return whole if not self._has_rows else self._with_sums(whole, lambda part: (part.own, {}))

    def _with_sums(self, whole: Results, look: Callable[[_Part], tuple[Any, dict[str, Tensor]]]) -> Results:
        """Results with h̄ = W ā, and with fields that are sums over ranks of what ``look`` finds on each."""
        new = {module: dict(measured.items()) for module, measured in whole.items()}
        sent: list[tuple[_Part, str, Tensor]] = []
        for part in _parts(whole):
            found, sums = look(part)
            new[part.module][part.kind] = found = with_outputs(part.module, found)
            if self._has_rows and isinstance(found, LayerMoments):
                sums = {**sums, "h_bar": found.h_bar}  # of the rows of W that are here
            sent += [(part, name, value) for name, value in sums.items()]
        for (part, name, _), value in zip(sent, self._summed([value for *_, value in sent]), strict=True):
            new[part.module][part.kind] = replace(new[part.module][part.kind], **{name: value})
        return whole.like({module: Measured(quantities) for module, quantities in new.items()})


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
