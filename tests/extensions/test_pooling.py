"""Results of parts make the result of the whole by one rule, whatever the parts are."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest
import torch
from backpack import backpack
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.extensions import (
    FactorTraces,
    GramOperator,
    InputGram,
    InputQuantities,
    InputTraces,
    KBFGSQuantities,
    KFACFactors,
    KroneckerFactors,
    LayerExtension,
    averaged,
    extend,
    pooled,
)
from kfqn_ext.extensions.pooling import DATA, GRADIENTS, LOCATIONS, SQUARES, over, parts_of_one_loss, pool
from kfqn_ext.geometry import LayerPass
from tests.cases import FEW_EXAMPLES, IGNORE_EVEN_SAME, assert_close, random_cases

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64


def one_direction(module: nn.Module, a_bar: Tensor) -> Tensor:
    """The same in every part."""
    return torch.linspace(-1.0, 2.0, a_bar.numel(), dtype=a_bar.dtype).reshape(a_bar.shape)


EXTENSIONS: list[Callable[..., LayerExtension[Any]]] = [
    KBFGSQuantities,
    lambda **options: KBFGSQuantities(probe=one_direction, **options),
    KFACFactors,
    InputGram,
    lambda **options: InputQuantities(probe=one_direction, **options),
    FactorTraces,
    InputTraces,
]


def curved(h: Tensor) -> Tensor:
    """A loss for each datum."""
    return (h.sin() + h.square()).flatten(1).sum(1)


def measured(layer: Any, batches: Sequence[Tensor], scales: Sequence[float], reduction: str) -> list[list[Any]]:
    """For each batch alone, what all extensions make of the sum of its data's losses times a scale."""
    results = []
    for x, scale in zip(batches, scales, strict=True):
        extensions = [make(reduction=reduction) for make in EXTENSIONS]
        with backpack(*extensions):
            (curved(layer(x)).sum() * scale).backward()
        results.append([extension[layer] for extension in extensions])
    return results


def same(got: Any, want: Any, tol: float = 1e-12) -> None:
    assert type(got) is type(want)
    for f in fields(want):
        one, other = getattr(got, f.name), getattr(want, f.name)
        if isinstance(other, Tensor):
            assert_close(one, other, tol)
        elif isinstance(other, GramOperator):
            s = torch.randn(other.shape[:-1], dtype=F64)
            assert_close(one @ s, other @ s, tol)
        else:
            assert one == other and type(one) is type(other), f.name


@settings(FEW_EXAMPLES, max_examples=20)
@given(
    case=random_cases(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 2**31),
)
def test_parts_of_a_batch_pool_to_the_batch(case: Any, sizes: list[int], reduction: str, seed: int) -> None:
    """At once, and one after the other."""
    assume(len(case.shape) > len(getattr(case.layer(), "kernel_size", ())) + 1)
    torch.manual_seed(seed)
    layer, x = extend(case.layer()), torch.randn(sum(sizes), *case.shape[1:], dtype=F64)
    scale = 1 / len(x) if reduction == "mean" else 1.0
    (whole,) = measured(layer, [x], [scale], reduction)
    parts = measured(layer, x.split(sizes), [scale] * len(sizes), reduction)
    for want, results in zip(whole, zip(*parts, strict=True), strict=True):
        same(pooled(copy.deepcopy(results), reduction), want)
        same(functools.reduce(lambda old, new: pooled([old, new], reduction), results), want)


def batches_of_two_lengths() -> tuple[Any, list[Tensor]]:
    """With 5 and with 10 locations."""
    return extend(nn.Conv1d(2, 3, 3, dtype=F64)), [torch.randn(n, 2, t + 2, dtype=F64) for n, t in ((4, 5), (2, 10))]


def test_batches_of_a_data_set_weigh_by_their_data() -> None:
    layer, batches = batches_of_two_lengths()
    one, two = measured(layer, batches, [1 / 4, 1 / 2], "mean")
    for first, second in zip(one, two, strict=True):
        wanted = {
            f.name: (4 * getattr(first, f.name) + 2 * getattr(second, f.name)) / 6
            for f in fields(first)
            if isinstance(getattr(first, f.name), Tensor)
        }
        got = averaged([first, second])
        assert (got.num_data, got.num_locations) == (6, (4 * 5 + 2 * 10) / 6)
        for name, want in wanted.items():
            assert_close(getattr(got, name), want, 1e-13)


def test_another_rule_is_another_scale() -> None:
    """Processes that average their gradients, each of a mean loss: (1/R) Σ_r Σ_n ℓ_n / N_r over unequal batches."""
    layer, batches = batches_of_two_lengths()
    ranks = parts_of_one_loss(lambda part, whole: whole.num_data / (2 * part.num_data))
    local = measured(layer, batches, [1 / 4, 1 / 2], "mean")
    both = [pool([first, second], ranks) for first, second in zip(*local, strict=True)]
    shares = [make(reduction="mean", accumulate=True) for make in EXTENSIONS]
    with backpack(*shares):
        (sum(curved(layer(x)).mean() for x in batches) / 2).backward()
    for got, ext in zip(both, shares, strict=True):
        same(got, ext[layer])


def test_large_matrices_are_updated_in_place_and_nothing_else_is() -> None:
    layer, batches = batches_of_two_lengths()
    for reduction in ("mean", "sum"):
        for first, second in zip(*measured(layer, batches, [1.0, 1.0], reduction), strict=True):
            before = {f.name: getattr(first, f.name) for f in fields(first)}
            values = {name: t.clone() for name, t in before.items() if isinstance(t, Tensor)}
            got = pooled([first, second], reduction)
            for name, value in values.items():
                large = name in ("Omega", "Gamma") or (name == "A" and value.ndim == 2)
                assert (getattr(got, name) is before[name]) == (large or name == "s")
                assert torch.equal(before[name], value) != large


def test_what_a_part_lacks_the_whole_lacks() -> None:
    layer, batches = batches_of_two_lengths()
    first, second = (results[1] for results in measured(layer, batches, [1.0, 1.0], "mean"))
    assert first.A_s is not None and pooled([first, second], "mean").A_s is not None
    assert pooled([first, replace(second, A_s=None)], "mean").A_s is None


def test_a_wrong_reduction_is_named() -> None:
    one = KroneckerFactors(torch.ones(1, 1), torch.ones(1, 1), 1, 1)
    with pytest.raises(ValueError, match="reduction='none'"):
        pooled([one], "none")


# ------------------------------------------------------------------ an outsider's extension


@dataclass(frozen=True)
class Sizes:
    """Means of ‖a‖, of ∂h and of ∂h², of one location."""

    inputs: Annotated[Tensor, over(LOCATIONS)]
    gradient: Annotated[Tensor, over(GRADIENTS)]
    square: Annotated[Tensor, over(SQUARES)]
    num_data: int
    num_locations: float


class LayerSizes(LayerExtension[Sizes]):
    savefield = "sizes"

    def measure(self, module: nn.Module, layer: LayerPass) -> Sizes:
        norms, g = layer.geometry.patches(layer.x).norm(dim=-1), layer.grad_scale * layer.geometry.outputs(layer.g)
        means = (t.flatten(0, 1).mean(0) for t in (norms, g, g.square()))
        return Sizes(*means, layer.num_data, layer.num_locations)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_outsider_s_results_merge_by_their_declarations(reduction: str) -> None:
    layer, x = extend(nn.Conv2d(2, 3, 3, dtype=F64)), torch.randn(6, 2, 5, 5, dtype=F64)
    scale = 1 / 6 if reduction == "mean" else 1.0
    whole, parts = LayerSizes(reduction=reduction), LayerSizes(reduction=reduction, accumulate=True)
    with backpack(whole):
        (curved(layer(x)).sum() * scale).backward()
    for part in x.split([1, 3, 2]):
        with backpack(parts):
            (curved(layer(part)).sum() * scale).backward()
    assert layer.weight.sizes is parts[layer]
    same(parts[layer], whole[layer])


@dataclass(frozen=True)
class Silent:
    a: Annotated[Tensor, over(DATA)]
    b: Tensor
    num_data: int
    num_locations: float


@dataclass(frozen=True)
class Uncounted:
    a: Annotated[Tensor, over(DATA)]
    num_data: int


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (Silent(torch.ones(1), torch.ones(1), 1, 1), "Silent does not say how b is pooled.*over"),
        (Uncounted(torch.ones(1), 1), "Uncounted has no field num_locations.*overrides merge"),
        (torch.ones(1), "Tensor has no field num_data"),
    ],
)
def test_what_does_not_say_how_it_is_pooled_is_named(result: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        pooled([result, result], "mean")
