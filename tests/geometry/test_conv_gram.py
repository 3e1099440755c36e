"""A from correlations and from lines of the input equals A from its patches, and the switch between the two ways."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfqn_ext.geometry import ConvGeometry, conv, conv_lines, geometry_of
from kfqn_ext.geometry.conv_gram import correlation_gram
from kfqn_ext.geometry.conv_lines import line_gram
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
def layers(draw: st.DrawFn, strides: int) -> tuple[Any, Tensor]:
    """A convolution of stride up to ``strides`` with its input; its output has one location or some more."""
    dims = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 4 if dims < 3 else 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    stride = [draw(st.integers(1, strides)) for _ in range(dims)]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    # More padding than the kernel reaches: there are patches of zeros only.
    same = max(stride) == 1 and draw(st.booleans())
    padding: Any = "same" if same else [draw(st.integers(0, r + 1)) for r in reach]
    # Room for the kernel, and for a reflection or a circle, which need more places than they pad.
    size = [r + 2 + draw(st.integers(0, 4)) for r in reach]
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = {"padding_mode": draw(st.sampled_from(MODES)), "bias": draw(st.booleans()), "groups": groups}
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = CONVS[dims](i, o, kernel, stride, padding=padding, dilation=dilation, **options, dtype=F64)
    return layer, torch.randn(draw(st.integers(1, 3)), i, *size, dtype=F64)


def explicit_inner(g: ConvGeometry, layer: Any, x: Tensor) -> Tensor:
    """N A without the homogeneous coordinate, [G, J·|Δ|, J·|Δ|]."""
    inner = g.d_in - g.has_bias
    return len(x) * explicit_gram(layer, x).reshape(g.groups, g.d_in, g.d_in)[:, :inner, :inner]


@FEW_EXAMPLES
@given(case=layers(strides=1))
def test_correlations_equal_patches_at_any_size(case: tuple[Any, Tensor]) -> None:
    """Also where the output has fewer locations than the kernel has places, and no core of the input is left."""
    layer, x = case
    g = geometry(layer)
    x_padded, padding = g._prepare(x)
    want = explicit_inner(g, layer, x)
    A = torch.full_like(want, torch.nan)
    correlation_gram(x_padded, g.kernel_size, g.dilation, padding, g.groups, out=A)
    assert_close(A, want, 1e-12)


@FEW_EXAMPLES
@given(case=layers(strides=3), budget=st.integers(1, 200))
def test_lines_equal_patches_at_any_size(case: tuple[Any, Tensor], budget: int) -> None:
    """Also a few data at a time, and with strides that leave lines out."""
    layer, x = case
    g = geometry(layer)
    x_padded, padding = g._prepare(x)
    want = explicit_inner(g, layer, x)
    A = torch.full_like(want, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_lines, "_LINE_BUDGET", budget)
        line_gram(x_padded, g.kernel_size, g.stride, g.dilation, padding, g.groups, out=A)
    assert_close(A, want, 1e-12)


# The switch: stride 1, more than one place in the kernel, lines of more than 192 columns a group.
SWITCH: list[tuple[int, Any, dict[str, Any], bool]] = [
    (65, (3,), {}, True),
    (64, (3,), {}, False),
    (65, (3, 3), {"padding": 1}, True),
    (65, (3, 3), {"padding": "same", "dilation": 2}, True),
    (49, (2, 4), {"padding": "same"}, True),
    (49, (4, 2), {"padding": "same"}, False),
    (65, (3, 3), {"stride": (1, 2)}, False),
    (193, (1, 1), {}, False),  # no two offsets: patches are the input
    (193, (3, 1), {}, True),
    (8, (3, 3), {"padding": 1}, False),
    (97, (1, 2, 2), {"padding": 1}, True),
    (8, (3, 2, 2), {"padding": 1}, False),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("channels", "kernel", "options", "pays"), SWITCH)
def test_gram_on_both_sides_of_the_switch(
    channels: int,
    kernel: Any,
    options: dict[str, Any],
    pays: bool,
    groups: int,
    mode: str,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv, "_FEW_NUMBERS", 0)
    i = groups * channels
    layer = CONVS[len(kernel)](i, 2, kernel, **options, groups=groups, padding_mode=mode, bias=bias, dtype=F64)
    x = torch.randn(3, i, *(6, 5, 7)[: len(kernel)], dtype=F64)
    assert geometry(layer)._correlations_pay() == pays
    assert_close(geometry(layer).gram(x), explicit_gram(layer, x), 1e-12)


@pytest.mark.parametrize("channels", [16, 72])
def test_float32_is_as_precise_as_patches(channels: int) -> None:
    layer, x = CONVS[2](channels, 4, 3, padding=1), torch.randn(16, channels, 16, 16)
    want = explicit_gram(layer, x.double())
    assert geometry(layer)._correlations_pay() == (channels == 72)
    A = geometry(layer).gram(x)
    assert_close(A, want, 2e-6)
    assert_close(A.mT, A, 1e-6)
    assert torch.linalg.eigvalsh(A.double())[0] > -1e-5 * A.diagonal().max()


# Options, the input's size, and how many lines of 4·3·12 numbers a datum the kernel spans.
SPANS: list[tuple[dict[str, Any], tuple[int, ...], int]] = [
    ({}, (20, 12), 3),
    ({"stride": 2}, (20, 24), 3),
    ({"dilation": (2, 1)}, (20, 12), 5),
    ({"stride": (1, 3), "groups": 2}, (20, 36), 3),
    ({}, (5, 6, 12), 3 * 6),
]


@pytest.mark.parametrize(("options", "size", "lines"), SPANS)
def test_lines_are_let_go_and_hold_a_few_data(
    options: dict[str, Any], size: tuple[int, ...], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more numbers than the budget in all lines that live."""
    padding = tuple(options.get("dilation", (1,) * len(size)))
    layer = CONVS[len(size)](4, 6, 3, padding=padding, dtype=F64, **options)
    x = torch.randn(7, 4, *size, dtype=F64)
    assert not geometry(layer)._correlations_pay()
    unfolded, living, at_once, sizes = conv_lines._unfolded, [], [], []

    def counted(line: Tensor, *arguments: Any) -> Tensor:
        R = unfolded(line, *arguments)
        living.append(weakref.ref(R))
        sizes.append(sum(other.numel() for ref in living if (other := ref()) is not None))
        at_once.append(len(line))
        return R

    monkeypatch.setattr(conv_lines, "_unfolded", counted)
    monkeypatch.setattr(conv, "_FEW_NUMBERS", 0)
    budget = 2 * lines * 4 * 3 * 12
    monkeypatch.setattr(conv_lines, "_LINE_BUDGET", budget)
    assert_close(geometry(layer).gram(x), explicit_gram(layer, x), 1e-12)
    assert max(at_once) == 2 and budget / 2 < max(sizes) <= budget


@pytest.mark.parametrize("data", [4, 5])
def test_patches_are_written_out_where_they_are_few(data: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = CONVS[2](4, 6, 3, padding=1, groups=2, dtype=F64)
    x = torch.randn(data, 4, 6, 5, dtype=F64)
    monkeypatch.setattr(conv, "_FEW_NUMBERS", 4 * 6 * 5 * 2 * (2 * 9 + 1))
    written = []
    patches = ConvGeometry.patches
    monkeypatch.setattr(ConvGeometry, "patches", lambda self, x: written.append(len(x)) or patches(self, x))
    assert_close(geometry(layer).gram(x), explicit_gram(layer, x), 1e-12)
    assert written == ([4] if data == 4 else [])
