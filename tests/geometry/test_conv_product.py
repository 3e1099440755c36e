"""A s by matrix products and shifts, and by a convolution, each against explicit patches, whichever way is taken."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfqn_ext.geometry import ConvGeometry, geometry_of
from tests.cases import (
    ALL_CASES,
    CONVS,
    FEW_EXAMPLES,
    IGNORE_EVEN_SAME,
    Case,
    Explicit,
    random_cases,
)

pytestmark = IGNORE_EVEN_SAME
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
CONV_CASES = [case for case in ALL_CASES if case.kind in CONVS.values()]


WAYS = ("shifts", "convolution", "gram")


def check(case: Case, dtype: torch.dtype, way: str) -> None:
    layer, x = case.layer(dtype), case.input(dtype)
    geometry = geometry_of(layer)
    assert isinstance(geometry, ConvGeometry)
    batch = geometry.as_batch(x)
    explicit = Explicit(layer, batch, torch.zeros_like(geometry.as_batch(layer(x))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConvGeometry, "_shifts_pay", lambda self, k: way == "shifts")
        patch.setattr(ConvGeometry, "_gram_pays", lambda self, k: way == "gram")
        for k in (1, 3):
            s = torch.randn(*geometry.blocks, geometry.d_in, k, dtype=dtype)
            explicit.check_product(TOLERANCE[dtype], s, geometry.gram_product(batch, s))


@pytest.mark.parametrize("case", CONV_CASES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_ways_equal_patches(case: Case, dtype: torch.dtype, way: str) -> None:
    check(case, dtype, way)


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31), way=st.sampled_from(WAYS))
def test_all_ways_on_random_layers(case: Case, seed: int, way: str) -> None:
    if case.kind in CONVS.values():
        torch.manual_seed(seed)
        check(case, torch.float64, way)


@pytest.mark.parametrize(
    ("channels", "k", "options", "way"),
    [
        (3, 1, {"kernel_size": 3}, "shifts"),
        (3, 5, {"kernel_size": 3}, "convolution"),
        (2, 1, {"kernel_size": 3}, "convolution"),
        (16, 5, {"kernel_size": 3}, "shifts"),
        (16, 9, {"kernel_size": 3}, "convolution"),
        (12, 1, {"kernel_size": 3, "groups": 4}, "shifts"),
        (12, 5, {"kernel_size": 3, "groups": 4}, "gram"),
        (8, 1, {"kernel_size": 3, "groups": 4}, "gram"),
        (4, 1, {"kernel_size": 3, "groups": 4}, "convolution"),
        (4, 2, {"kernel_size": 3, "groups": 4}, "gram"),
        (68, 9, {"kernel_size": 3, "groups": 4}, "convolution"),
        (3, 1, {"kernel_size": 7, "stride": 2}, "convolution"),
        (2, 1, {"kernel_size": 1, "bias": False}, "shifts"),
    ],
)
def test_the_way_follows_from_kernel_channels_and_columns(
    channels: int, k: int, options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def note(name: str, method: str) -> None:
        real = getattr(ConvGeometry, method)
        monkeypatch.setattr(ConvGeometry, method, lambda *args: taken.append(name) or real(*args))

    for name, method in zip(WAYS, ("_shifted_product", "_convolved_product", "gram"), strict=True):
        note(name, method)
    geometry = geometry_of(CONVS[2](channels, 4, **options))
    assert isinstance(geometry, ConvGeometry)
    geometry.gram_product(torch.randn(2, channels, 8, 8), torch.randn(*geometry.blocks, geometry.d_in, k))
    assert taken == [way]
