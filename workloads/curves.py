"""Images of the kind of CURVES, made here: smooth curves through three random points.

CURVES itself is Salakhutdinov's; these are not its images, so their losses are not comparable with its.
"""

import torch
from torch import Tensor

SIZE = 28
_MARGIN = 3.0
_BLUR = 0.75  # standard deviation of a line's profile, in pixels
_POINTS_PER_CURVE = 96  # closer than half a pixel: no gaps


def curve_images(count: int = 20_000, seed: int = 0) -> Tensor:
    """Draw curves as vectors of 784 pixels in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    corners = _MARGIN + (SIZE - 1 - 2 * _MARGIN) * torch.rand(count, 3, 2, generator=generator)
    return torch.cat([_draw(chunk) for chunk in corners.split(500)])


def _draw(corners: Tensor) -> Tensor:
    """Draw the parabola that passes through p₀, p₁, p₂ at times 0, ½, 1, as a blurred line."""
    t = torch.linspace(0, 1, _POINTS_PER_CURVE)
    lagrange = torch.stack([(2 * t - 1) * (t - 1), 4 * t * (1 - t), t * (2 * t - 1)], dim=1)
    curve = lagrange @ corners  # [n, points, 2]
    axis = torch.arange(SIZE, dtype=torch.float32)
    pixels = torch.cartesian_prod(axis, axis).expand(len(corners), -1, -1)
    distance = torch.cdist(pixels, curve).amin(dim=2)
    # In 256 shades, as scanned images have: the tails of the profile are subnormal numbers, with which a CPU is slow.
    return torch.exp(-0.5 * (distance / _BLUR) ** 2).mul(255).round().div(255)
