"""Where each operation is a launch, A and A s of a convolution take few of them, and are the same."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from kfqn_ext.geometry import ConvGeometry, conv, geometry_of
from workloads.operations import Operations

LAYERS = {
    "ResNet32's": (nn.Conv2d(16, 16, 3, padding=1, bias=False), (32, 16, 32, 32)),
    "with stride": (nn.Conv2d(16, 32, 3, stride=2, padding=1), (32, 16, 32, 32)),
    "VGG16's": (nn.Conv2d(64, 64, 3, padding=1), (8, 64, 32, 32)),
    "of groups": (nn.Conv2d(16, 32, 3, groups=4, padding=1), (32, 16, 32, 32)),
    "dilated, of three dimensions": (nn.Conv3d(4, 4, 3, dilation=2, padding=1), (8, 4, 12, 12, 12)),
    "of one dimension": (nn.Conv1d(8, 8, 5, padding=2, padding_mode="circular"), (64, 8, 256)),
}
each = pytest.mark.parametrize("name", LAYERS)


def layer(name: str) -> tuple[ConvGeometry, tuple[int, ...]]:
    module, shape = LAYERS[name]
    return cast(ConvGeometry, geometry_of(module)), shape


def products(geometry: ConvGeometry, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.linspace(-1, 1, geometry.groups * geometry.d_in * 2, dtype=x.dtype, device=x.device)
    return geometry.gram(x), geometry.gram_product(x, s.reshape(*geometry.blocks, geometry.d_in, 2))


def launches(geometry: ConvGeometry, x: torch.Tensor) -> int:
    with Operations() as operations:
        products(geometry, x)
    return operations.number


@each
def test_few_launches(name: str) -> None:
    """On the device "meta", whose operations compute nothing: all devices but the CPU are treated alike."""
    geometry, shape = layer(name)
    assert launches(geometry, torch.empty(shape, device="meta")) <= 25


def test_how_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/design.md has it: A, then A s, by lines and shifts and by what is chosen where each is a launch."""
    geometry, shape = layer("ResNet32's")
    x, s = torch.rand(shape), torch.rand(geometry.d_in, 1)
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(conv, "launches_count", lambda x, on_gpu=on_gpu: on_gpu)
        for product in (lambda: geometry.gram(x), lambda: geometry.gram_product(x, s)):
            with Operations() as operations:
                product()
            found.append(operations.number)
    assert found == [210, 21, 6, 5]


@each
def test_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, shape = layer(name)
    x = torch.rand(shape, dtype=torch.float64)
    here = products(geometry, x)
    monkeypatch.setattr(conv, "launches_count", lambda x: True)
    for ours, theirs in zip(products(geometry, x), here, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("at_a_time", [1, 3, 8])
def test_a_part_of_the_data_at_a_time(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part may be smaller, and no part holds more patches than the budget, but for a single datum's."""
    geometry, _ = layer("VGG16's")
    x = torch.rand(8, 64, 16, 16, dtype=torch.float64)
    here, seen = geometry.gram(x), []
    plain = ConvGeometry.patches

    def patches(self: ConvGeometry, part: torch.Tensor) -> Any:
        seen.append(len(part))
        return plain(self, part)

    monkeypatch.setattr(ConvGeometry, "patches", patches)
    monkeypatch.setattr(conv, "launches_count", lambda x: True)
    monkeypatch.setattr(conv, "_PATCH_BUDGET", at_a_time * 16 * 16 * geometry.d_in)
    torch.testing.assert_close(geometry.gram(x), here)
    assert max(seen) == at_a_time and sum(seen) == 8


@pytest.mark.gpu
@each
def test_the_same_numbers_on_a_gpu(name: str) -> None:
    geometry, shape = layer(name)
    x = torch.rand(shape, dtype=torch.float64)
    for there, here in zip(products(geometry, x.cuda()), products(geometry, x), strict=True):
        torch.testing.assert_close(there.cpu(), here)
