"""Layers over everything that the geometries describe, with inputs: what every suite over the registry runs on."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import reference as ref

CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODES = ("zeros", "circular", "reflect", "replicate")
# torch says so about every even kernel; we only want its result.
IGNORE_EVEN_SAME = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
# Reproducible, without a database on disk, and independent of how busy the machine is.
FEW_EXAMPLES = settings(
    max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@dataclass(frozen=True)
class Case:
    """A kind of layer, its arguments, and the shape of its input (without N where it is unbatched)."""

    kind: Any
    arguments: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]

    def layer(self, dtype: torch.dtype = torch.float64) -> Any:
        return self.kind(**dict(self.arguments), dtype=dtype)

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(self.shape, dtype=dtype)

    def __str__(self) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.kind.__name__}({values}) on {list(self.shape)}".replace(" ", "")


def case(kind: Any, shape: tuple[int, ...], **arguments: Any) -> Case:
    return Case(kind, tuple(arguments.items()), shape)


def conv(dims: int, shape: tuple[int, ...], i: int = 4, o: int = 6, k: Any = 3, **arguments: Any) -> Case:
    return case(CONVS[dims], shape, in_channels=i, out_channels=o, kernel_size=k, **arguments)


def _linear_cases() -> list[Case]:
    shapes = [(7, 5), (1, 5), (7, 2, 5), (7, 2, 3, 5), (1, 1, 5), (5,)]
    return [
        case(nn.Linear, shape, in_features=5, out_features=4, bias=bias)
        for shape, bias in itertools.product(shapes, (True, False))
    ]


def _conv_cases() -> list[Case]:
    cases = []
    for dims in (1, 2, 3):
        kernel, even, stride, dilation, sides, size = (
            v[:dims] for v in ((3, 2, 3), (2, 4, 2), (2, 1, 3), (1, 2, 2), (2, 1, 2), (7, 6, 5))
        )
        x = (3, 4, *size)
        for bias in (True, False):
            cases += [
                conv(dims, x, k=kernel, bias=bias),
                conv(dims, x, k=kernel, stride=stride, dilation=dilation, padding=sides, bias=bias),
                conv(dims, x, k=even, groups=2, stride=stride, padding=1, bias=bias),
                conv(dims, x, o=8, k=kernel, groups=4, padding="same", bias=bias),  # depthwise, two filters a channel
                conv(dims, x, o=4, k=even, groups=4, padding="same", dilation=dilation, bias=bias),
                conv(dims, x, k=1, bias=bias),
                conv(dims, x, k=size, padding="valid", bias=bias),  # |T| = 1
                conv(dims, x[1:], k=kernel, groups=2, padding=1, bias=bias),  # unbatched
            ]
        for mode, padding in itertools.product(MODES, ("same", sides)):
            cases.append(conv(dims, x, k=even, padding=padding, padding_mode=mode))
            cases.append(conv(dims, x, k=kernel, padding=padding, dilation=dilation, groups=2, padding_mode=mode))
    # Strides that leave pixels of the padded border unused (a fault that BackPACK once had).
    cases += [
        conv(2, (3, 4, 6, 6), k=3, stride=3, padding=2, dilation=2),
        conv(2, (3, 4, 6, 6), k=3, stride=3, padding=2, dilation=2, groups=2, bias=False),
        conv(2, (3, 4, 6, 6), k=2, stride=4, padding=1, padding_mode="circular"),
        conv(1, (3, 4, 8), k=1, stride=3),
    ]
    return cases


CASES: dict[Any, list[Case]] = {nn.Linear: _linear_cases()}
for _case in _conv_cases():
    CASES.setdefault(_case.kind, []).append(_case)
ALL_CASES = [one for cases in CASES.values() for one in cases]

every_case = pytest.mark.parametrize("case", ALL_CASES, ids=str)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Any layer that torch accepts, small."""
    dims = draw(st.integers(0, 3))
    bias = draw(st.booleans())
    batch = draw(st.sampled_from([(), (1,), (2,), (5,)]))
    if dims == 0:
        middle = tuple(draw(st.lists(st.integers(1, 3), max_size=2))) if batch else ()
        d_in, d_out = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        return case(nn.Linear, (*batch, *middle, d_in), in_features=d_in, out_features=d_out, bias=bias)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation = each(1, 4 if dims < 3 else 3), each(1, 2)
    mode = draw(st.sampled_from(MODES))
    padding = draw(st.sampled_from(["ints", "same", "valid"]))
    stride = (1,) * dims if padding == "same" else each(1, 3)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    amount: Any = each(0, 2) if padding == "ints" else padding
    sides = {"ints": amount, "same": [(r + 1) // 2 for r in reach], "valid": (0,) * dims}[padding]
    # Room for the kernel, and for a reflection, which needs more pixels than it pads.
    size = tuple(max(r + 1 - 2 * p, p + 1) + draw(st.integers(0, 3)) for r, p in zip(reach, sides, strict=True))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    i, o = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    return conv(
        dims, (*batch, i, *size), i, o, kernel,
        stride=stride, padding=amount, dilation=dilation, groups=groups, bias=bias, padding_mode=mode,
    )  # fmt: skip


def assert_close(got: Tensor, want: Tensor, tol: float, scale: Tensor | None = None) -> None:
    """Compare to ``tol`` relative to the largest entry of ``scale``: what the terms of a sum add up to in size.

    Without a scale that is ``want`` itself. A mean of terms of either sign may be as small as rounding leaves it, so
    no other measure of a relative error holds for all inputs.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    size = float((want if scale is None else scale).abs().max()) if want.numel() else 0.0
    error = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert error <= tol * size + 1e-300, f"error {error:.2e} of {size:.2e}, relative {error / (size or 1):.2e} > {tol}"


class Explicit:
    """A layer's quantities from explicit patches in float64; ``size`` has the absolute values of all terms."""

    @torch.no_grad()
    def __init__(self, module: Any, x: Tensor, g: Tensor) -> None:
        """From the layer, its input, and the mean loss's gradient by its output."""
        module = copy.deepcopy(module).double()
        x, g, h = x.detach().double(), g.detach().double(), module(x.detach().double())
        self.g = g
        self.seen, self.size = ref.Layer(module, x, h, g), ref.Layer(module, x.abs(), h, g.abs())
        self.W = ref.weight_matrix(module)
        self.size.h_bar = torch.einsum("...ij,...j->...i", self.W.abs(), self.size.a_bar)

    def check(self, tol: float, **got: Tensor) -> None:
        """Compare quantities by their name in ``reference.Layer``."""
        for name, value in got.items():
            try:
                assert_close(value, getattr(self.seen, name), tol, getattr(self.size, name))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None

    def check_product(self, tol: float, s: Tensor, A_s: Tensor) -> None:
        """Compare A s, for s [*B, d_in] or [*B, d_in, k]."""
        columns = s.double().reshape(*self.seen.A.shape[:-1], -1)
        want, size = self.seen.A @ columns, self.size.A @ columns.abs()
        assert_close(A_s, want.reshape(s.shape), tol, size)
