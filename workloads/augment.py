"""What is done to images before a network sees them."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_PADDING = 4


def crop_and_flip(x: Tensor) -> Tensor:
    """Shift each image by up to four pixels, zeros coming in, and mirror half of them: [n, c, h, w]."""
    n, _, h, w = x.shape
    windows = F.pad(x, [_PADDING] * 4).unfold(2, h, 1).unfold(3, w, 1)  # all crops, as a view
    top, left = torch.randint(2 * _PADDING + 1, (2, n)).to(x.device)
    crops = windows[torch.arange(n, device=x.device), :, top, left]
    mirrored = (torch.rand(n) < 0.5).to(x.device)
    return torch.where(mirrored[:, None, None, None], crops.flip(3), crops)


def normalizer(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Shift and scale each channel."""

    def normalize(x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        return (x - x.new_tensor(mean).view(shape)) / x.new_tensor(std).view(shape)

    return normalize
