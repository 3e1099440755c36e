"""Which modules are layers, which are refused and why, and how to teach the package another kind."""

import warnings
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities, extend
from kfqn_ext.geometry import LinearGeometry, base, geometry_of, is_layer, refusal, register


class PlainSubclass(nn.Linear):
    """Changes nothing that matters."""


class OtherForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, 2 * self.weight, self.bias)


class OtherConvForward(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, 2 * weight, bias)


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda input: nn.functional.linear(input, 2 * layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        return nn.utils.weight_norm(nn.Linear(2, 2))


def test_a_subclass_that_computes_the_same_is_a_layer() -> None:
    assert refusal(PlainSubclass(2, 3)) is None
    assert geometry_of(PlainSubclass(2, 3)) == geometry_of(nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: OtherForward(2, 2), "overrides Linear.forward"),
        (lambda: OtherConvForward(2, 2, 1), "overrides Conv2d._conv_forward"),
        (patched, "overrides Linear.forward"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized"),
        (old_weight_norm, "computed from other tensors"),
        (lambda: nn.MultiheadAttention(2, 1).out_proj, "MultiheadAttention"),
        (lambda: nn.LazyLinear(2), "lazy"),
        (lambda: nn.LazyConv2d(2, 1), "lazy"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(build: Any, reason: str) -> None:
    module = build()
    assert is_layer(module) and geometry_of(module) is None
    assert reason in str(refusal(module))


@pytest.mark.parametrize("module", [nn.ReLU(), nn.BatchNorm2d(2), nn.ConvTranspose2d(2, 2, 1), nn.Bilinear(2, 2, 2)])
def test_other_modules_are_no_layers(module: nn.Module) -> None:
    assert not is_layer(module) and geometry_of(module) is None and "not a registered kind" in str(refusal(module))


def test_refusal_does_not_run_a_parametrization() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    assert refusal(layer) is not None  # reading layer.weight would run a step of the power iteration
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_a_lazy_layer_is_one_after_its_first_forward_pass() -> None:
    layer = nn.LazyConv2d(4, 3)
    layer(torch.rand(1, 2, 5, 5))
    assert geometry_of(layer) == geometry_of(nn.Conv2d(2, 4, 3))


def test_register_teaches_another_kind() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.rand(3, 2)), None

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    try:
        register(Mine, LinearGeometry.of)
        geometry = geometry_of(Mine())
        assert geometry is not None and geometry.matrix_shape == (3, 2)
    finally:
        base._REGISTRY.pop(Mine, None)
    assert not is_layer(Mine())


class Renamed(nn.Linear):
    """The same with another name of its input; that it is the same, only its author knows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_subclass_of_a_registered_kind_can_be_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest class in the order of inheritance counts, whichever was registered first."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    assert geometry_of(Renamed(2, 3)) is None
    register(Renamed, LinearGeometry.of)
    assert geometry_of(Renamed(2, 3)) == geometry_of(nn.Linear(2, 3))
    layer, moments = extend(Renamed(2, 3)), KBFGSQuantities()
    with backpack(moments):
        layer(x=torch.rand(4, 2)).sum().backward()  # whatever its input is called
    assert moments[layer].num_data == 4


@pytest.mark.parametrize("name", ["stride", "dilation", "padding"])
def test_a_number_for_all_dimensions_set_after_construction(name: str) -> None:
    layer, same = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3, **{name: 2})
    setattr(layer, name, 2)
    assert geometry_of(layer) == geometry_of(same)
    layer.padding, same.padding = "same", "same"
    layer.stride, same.stride = 1, (1, 1)
    assert geometry_of(layer) == geometry_of(same)
