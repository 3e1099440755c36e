"""A from correlations of the input equals A from its patches, on both sides of the switch between the two ways."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.geometry import ConvGeometry, conv, geometry_of
from kfqn_ext.geometry.conv_gram import correlation_gram
from tests import reference as ref
from tests.cases import CONVS, FEW_EXAMPLES, IGNORE_EVEN_SAME, MODES, assert_close

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64


def explicit_gram(layer: Any, x: Tensor) -> Tensor:
    a = ref.patches(layer, x)
    return torch.einsum("nt...i,nt...j->...ij", a, a) / len(x)


def geometry(layer: Any) -> ConvGeometry:
    found = geometry_of(layer)
    assert isinstance(found, ConvGeometry)
    return found


@st.composite
def stride_1_layers(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """A convolution of stride and dilation 1 with its input; its output has one location or some more."""
    dims = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 4 if dims < 3 else 3)) for _ in range(dims)]
    sides = [draw(st.integers(0, k - 1)) for k in kernel]
    padding: Any = "same" if draw(st.booleans()) else sides
    # Room for the kernel, and for a reflection or a circle, which need more places than they pad.
    size = [k + draw(st.integers(0, 5)) for k in kernel]
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    mode, bias = draw(st.sampled_from(MODES)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = CONVS[dims](i, o, kernel, padding=padding, padding_mode=mode, groups=groups, bias=bias, dtype=F64)
    return layer, torch.randn(draw(st.integers(1, 3)), i, *size, dtype=F64)


@FEW_EXAMPLES
@given(case=stride_1_layers())
def test_correlations_equal_patches_at_any_size(case: tuple[Any, Tensor]) -> None:
    """Also where the output has fewer locations than the kernel has places, and no core of the input is left."""
    layer, x = case
    g, padded = geometry(layer), geometry(layer).pad(x)
    A = correlation_gram(padded, g.kernel_size, g.groups, conv._WEIGHT_GRAD[g.dims]) / len(x)
    inner = g.d_in - g.has_bias
    assert_close(A, explicit_gram(layer, x).reshape(g.groups, g.d_in, g.d_in)[:, :inner, :inner], 1e-12)


# The switch: the output must have 4 (k - 1) locations along every dimension.
SWITCH = [
    (1, (3,), (8,), True),
    (1, (3,), (7,), False),
    (2, (3, 3), (8, 8), True),
    (2, (3, 3), (8, 7), False),
    (2, (3, 1), (8, 1), True),
    (2, (1, 1), (8, 8), False),  # no two offsets: patches are the input
    (2, (2, 4), (4, 12), True),
    (2, (2, 4), (4, 11), False),
    (3, (3, 2, 2), (8, 4, 4), True),
    (3, (3, 2, 2), (7, 4, 4), False),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("groups", "dims", "kernel", "locations", "pays"), [(g, *s) for g in (1, 2) for s in SWITCH])
def test_gram_on_both_sides_of_the_switch(
    dims: int, kernel: Any, locations: Any, pays: bool, groups: int, mode: str, bias: bool
) -> None:
    padding = [k // 2 for k in kernel]
    size = [t + k - 1 - 2 * p for t, k, p in zip(locations, kernel, padding, strict=True)]
    layer = CONVS[dims](4, 6, kernel, padding=padding, padding_mode=mode, groups=groups, bias=bias, dtype=F64)
    x = torch.randn(3, 4, *size, dtype=F64)
    assert tuple(layer(x).shape[2:]) == locations
    assert geometry(layer)._correlations_pay(geometry(layer).pad(x)) == pays
    assert_close(geometry(layer).gram(x), explicit_gram(layer, x), 1e-12)


def test_float32_is_as_precise_as_patches() -> None:
    layer, x = CONVS[2](8, 4, 3, padding=1), torch.randn(16, 8, 16, 16)
    want = explicit_gram(layer, x.double())
    assert geometry(layer)._correlations_pay(geometry(layer).pad(x))
    A = geometry(layer).gram(x)
    assert_close(A, want, 2e-6)
    assert_close(A.mT, A, 1e-6)
    assert torch.linalg.eigvalsh(A.double())[0] > -1e-5 * A.diagonal().max()


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"stride": (1, 3), "groups": 2}])
def test_strided_and_dilated_layers_take_a_few_data_at_a_time(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = CONVS[2](4, 6, 3, padding=1, dtype=F64, **options), torch.randn(7, 4, 20, 20, dtype=F64)
    assert not geometry(layer)._correlations_pay(geometry(layer).pad(x))
    at_once, sizes = [], []
    patches = ConvGeometry.patches

    def counted(self: ConvGeometry, x: Tensor) -> Tensor:
        at_once.append(len(x)), sizes.append(patches(self, x).numel())
        return patches(self, x)

    monkeypatch.setattr(ConvGeometry, "patches", counted)
    budget = 2 * patches(geometry(layer), x[:1]).numel() + 1
    monkeypatch.setattr(conv, "_PATCH_BUDGET", budget)
    assert_close(geometry(layer).gram(x), explicit_gram(layer, x), 1e-12)
    assert max(at_once) == 2 and max(sizes) <= budget
