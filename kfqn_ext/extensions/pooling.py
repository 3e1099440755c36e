"""How the results of parts make the result of the whole: of calls, of micro-batches, of the batches of a data set.

A result is a dataclass with ``num_data``, N, and ``num_locations``, |T|. Each of its other fields declares over what it
is a mean. A rule says how much a part weighs in each such mean, given its counts and the whole's. With N = Σ N_p data
and M = Σ N_p |T_p| terms in the whole, the rules are

| rule                   | LOCATIONS   | DATA  | GRADIENTS                | SQUARES                   |
|------------------------|-------------|-------|--------------------------|---------------------------|
| parts of one loss      | N_p T_p / M | N_p/N | c_p N_p T_p / M          | c_p² N_p T_p / M          |
| independent batches    | N_p/N       | N_p/N | N_p/N                    | N_p/N                     |

c_p turns a part's gradients of a datum's loss into the whole's. Autograd's gradients add up over the parts of one loss;
per datum they were multiplied with N_p where the loss is a mean over data, and N belongs there: c_p = N / N_p. Where it
is a sum nothing was multiplied: c_p = 1.

Example:
    >>> import torch
    >>> from kfqn_ext.extensions import Gram, pooled
    >>> one, two = Gram(torch.tensor([[1.0]]), 2, 1), Gram(torch.tensor([[4.0]]), 1, 1)
    >>> pooled([one, two], "mean").A
    tensor([[2.]])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Protocol, TypeVar, get_type_hints

from torch import Tensor

R = TypeVar("R")
_COUNTS = ("num_data", "num_locations")


class Counted(Protocol):
    """What knows how much it averages."""

    @property
    def num_data(self) -> int:
        """N."""

    @property
    def num_locations(self) -> float:
        """|T|."""


@dataclass(frozen=True)
class Counts:
    """How much a whole averages.

    Attributes:
        num_data: N.
        num_locations: |T|, a mean over data where the parts differ.
    """

    num_data: int
    num_locations: float

    @classmethod
    def of(cls, parts: Sequence[Counted]) -> "Counts":
        """Count the data of all parts, and their locations on average."""
        data = sum(part.num_data for part in parts)
        locations = sum(part.num_data * part.num_locations for part in parts) / data
        return cls(data, int(locations) if locations == int(locations) else locations)


# ------------------------------------------------------------------ what a field declares


class Mean(Enum):
    """What a field is a mean of, and over what."""

    LOCATIONS = "over data and locations, of what does not depend on the loss"
    DATA = "over data, of what does not depend on the loss, sums over locations included"
    GRADIENTS = "over data and locations, of gradients of a datum's loss"
    SQUARES = "over data and locations, of products of two such gradients"


LOCATIONS, DATA, GRADIENTS, SQUARES = Mean

_Weights = Callable[[Mean], list[float]]


@dataclass(frozen=True)
class Pooling:
    """How a field is pooled.

    Attributes:
        function: Maps the values in all parts, and the parts' weights in a mean, to the value in the whole.
        mean: What it is a mean of, if it is one.
    """

    function: Callable[[list[Any], _Weights], Any]
    mean: Mean | None = None


def over(mean: Mean, *, in_place: bool = False) -> Pooling:
    """Declare that a field of a result, a tensor, is a mean.

    ``a_bar: Annotated[Tensor, over(LOCATIONS)]``.

    Args:
        mean: LOCATIONS, DATA, GRADIENTS or SQUARES.
        in_place: Write the whole's mean into the first part's tensor: of a large matrix there is then no second copy.

    Returns:
        What the field's type is annotated with.
    """
    return Pooling(partial(_average, mean, in_place), mean)


def combined(function: Callable[[list[Any]], Any]) -> Pooling:
    """Declare that a field of a result is no mean, but a function of its values in all parts.

    ``s: Annotated[Tensor, combined(itemgetter(0))]``.

    Args:
        function: Maps the values in all parts, in their order, to the value in the whole.

    Returns:
        What the field's type is annotated with.
    """
    return Pooling(lambda values, weights: function(values))


def _average(mean: Mean, in_place: bool, values: list[Tensor], weights: _Weights) -> Tensor:
    (first, *others), (weight, *other_weights) = values, weights(mean)
    total = first.mul_(weight) if in_place else first * weight
    for value, weight in zip(others, other_weights, strict=True):
        total.add_(value, alpha=weight)
    return total


# ------------------------------------------------------------------ the rules

Rule = Mapping[Mean, Callable[[Counted, Counted], float]]
"""How much a part weighs in the whole, by what is averaged, given the counts of both."""


def _by_data(part: Counted, whole: Counted) -> float:
    return part.num_data / whole.num_data


def _by_locations(part: Counted, whole: Counted) -> float:
    return part.num_data * part.num_locations / (whole.num_data * whole.num_locations)


def parts_of_one_loss(scale: Callable[[Counted, Counted], float]) -> Rule:
    """The rule for results whose losses add up to the whole's.

    Args:
        scale: c_p, what a part's gradients of a datum's loss are to be multiplied with to be the whole's.

    Returns:
        The rule.
    """
    return {
        LOCATIONS: _by_locations,
        DATA: _by_data,
        GRADIENTS: lambda part, whole: scale(part, whole) * _by_locations(part, whole),
        SQUARES: lambda part, whole: scale(part, whole) ** 2 * _by_locations(part, whole),
    }


_SHARES: dict[str, Rule] = {
    "mean": parts_of_one_loss(lambda part, whole: whole.num_data / part.num_data),
    "sum": parts_of_one_loss(lambda part, whole: 1.0),
}
INDEPENDENT: Rule = dict.fromkeys(Mean, _by_data)


def shares(reduction: str) -> Rule:
    """The rule for parts of a loss that is the mean or the sum over the data of all parts.

    Raises:
        ValueError: If ``reduction`` is neither "mean" nor "sum".
    """
    if reduction not in _SHARES:
        raise ValueError(f"reduction={reduction!r}: say what the loss does over the data of a batch, 'mean' or 'sum'.")
    return _SHARES[reduction]


# ------------------------------------------------------------------ the results


def pooled(results: Sequence[R], reduction: str) -> R:
    """What one call on the joined batch would have given, from parts whose losses are shares of its loss.

    As with ``.grad`` of micro-batches, whose losses are Σ_n ℓ_n over the N of all (over nothing, for a sum). Directions
    s are to be the same in all parts. The first result's large matrices are overwritten.

    Args:
        results: One a part, of one layer.
        reduction: "mean" or "sum": what the whole's loss does over its data.

    Returns:
        The whole's result.

    Raises:
        ValueError: If ``reduction`` is neither "mean" nor "sum".
        TypeError: If a field does not say how it is pooled.
    """
    return pool(results, shares(reduction))


def averaged(results: Sequence[R]) -> R:
    """The mean over the data of independent batches, each with a loss of its own; every datum weighs the same.

    Args:
        results: One a batch, of one layer. The first one's large matrices are overwritten.

    Returns:
        Their mean.

    Raises:
        TypeError: If a field does not say how it is pooled.
    """
    return pool(results, INDEPENDENT)


def pool(results: Sequence[R], rule: Rule) -> R:
    """Pool results by a rule; see :func:`pooled` and :func:`averaged`. What a part lacks, None, the whole lacks."""
    parts: Sequence[Any] = results
    declared, values = _declared(parts[0].__class__), {}
    whole = Counts.of(parts)

    def weights(mean: Mean) -> list[float]:
        return [rule[mean](part, whole) for part in parts]

    for name, pooling in declared.items():
        found = [getattr(part, name) for part in parts]
        values[name] = None if any(value is None for value in found) else pooling.function(found, weights)
    result: R = parts[0].__class__(num_data=whole.num_data, num_locations=whole.num_locations, **values)
    return result


def means_of(result: Any) -> dict[str, Mean]:
    """The fields of a result that are means and that it has, in their order."""
    declared = _declared(result.__class__)
    return {
        name: pooling.mean
        for name, pooling in declared.items()
        if pooling.mean is not None and getattr(result, name) is not None
    }


@cache
def _declared(kind: type[Any]) -> dict[str, Pooling]:
    """How each field but the counts is pooled."""
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else []
    hints = get_type_hints(kind, include_extras=True)
    found = {name: [m for m in getattr(hints[name], "__metadata__", ()) if isinstance(m, Pooling)] for name in names}
    missing = [f"has no field {name}" for name in _COUNTS if name not in found]
    silent = [f"does not say how {name} is pooled" for name in names if not found[name] and name not in _COUNTS]
    if missing or silent:
        raise TypeError(
            f"{kind.__name__} {(missing + silent)[0]}. A result that can be merged is a dataclass with num_data and "
            "num_locations, whose other fields are annotated with over(...) or combined(...) of "
            "kfqn_ext.extensions.pooling; or its extension overrides merge."
        )
    return {name: poolings[0] for name, poolings in found.items() if name not in _COUNTS}
