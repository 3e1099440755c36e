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


def check(case: Case, dtype: torch.dtype, shifts_pay: bool) -> None:
    layer, x = case.layer(dtype), case.input(dtype)
    geometry = geometry_of(layer)
    assert isinstance(geometry, ConvGeometry)
    batch = geometry.as_batch(x)
    explicit = Explicit(layer, batch, torch.zeros_like(geometry.as_batch(layer(x))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConvGeometry, "_shifts_pay", lambda self: shifts_pay)
        for k in (1, 3):
            s = torch.randn(*geometry.blocks, geometry.d_in, k, dtype=dtype)
            explicit.check_product(TOLERANCE[dtype], s, geometry.gram_product(batch, s))


@pytest.mark.parametrize("case", CONV_CASES, ids=str)
@pytest.mark.parametrize("shifts_pay", [True, False], ids=["shifts", "convolution"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_both_ways_equal_patches(case: Case, dtype: torch.dtype, shifts_pay: bool) -> None:
    check(case, dtype, shifts_pay)


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31), shifts_pay=st.booleans())
def test_both_ways_on_random_layers(case: Case, seed: int, shifts_pay: bool) -> None:
    if case.kind in CONVS.values():
        torch.manual_seed(seed)
        check(case, torch.float64, shifts_pay)


@pytest.mark.parametrize(
    ("channels", "options", "pays"),
    [
        (3, {"kernel_size": 3}, True),
        (2, {"kernel_size": 3}, False),
        (12, {"kernel_size": 3, "groups": 4}, True),
        (8, {"kernel_size": 3, "groups": 4}, False),
        (3, {"kernel_size": 7, "stride": 2}, False),
        (2, {"kernel_size": 1, "bias": False}, True),
    ],
)
def test_the_switch_compares_the_kernel_with_the_channels(channels: int, options: dict[str, Any], pays: bool) -> None:
    geometry = geometry_of(CONVS[2](channels, 4, **options))
    assert isinstance(geometry, ConvGeometry) and geometry._shifts_pay() == pays
