"""Ways to A and to A s of a convolution: ``python -m benchmarks.ways``.

The usual one, by patches that ``F.unfold`` writes out, beside those among which ``kfqn_ext.geometry`` chooses by the
layer's shape. 3×3 kernels, 128 images. Milliseconds of process time, medians, one thread.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import options
from benchmarks.report import markdown
from benchmarks.tried import milliseconds
from kfqn_ext.geometry import ConvGeometry, geometry_of
from kfqn_ext.geometry.conv_gram import correlation_gram
from kfqn_ext.geometry.conv_lines import line_gram

SIZES = ((1, 28), (3, 32), (16, 32), (32, 16), (64, 8), (128, 16), (256, 8))  # channels, height and width
_HEAD = ["channels of", "A: patches", "lines", "correlations", "A s: patches", "convolution", "shifts"]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {f"{channels} of {size}×{size}": _milliseconds(args.batch, channels, size) for channels, size in SIZES}
    options.finish(args, "ways", torch.device("cpu"), {"milliseconds": found}, render)


def render(results: dict[str, Any]) -> str:
    """A row a layer."""
    return markdown([_HEAD, *([name, *(f"{ms:.2f}" for ms in row)] for name, row in results["milliseconds"].items())])


def _milliseconds(batch: int, channels: int, size: int) -> list[float]:
    return [milliseconds(run) for run in runs(batch, channels, size, torch.device("cpu")).values()]


def runs(batch: int, channels: int, size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """All ways for one layer, by their names in the table."""
    geometry = cast(ConvGeometry, geometry_of(nn.Conv2d(channels, channels, 3, padding=1, bias=False)))
    new = partial(torch.randn, device=device)
    x, s, A = new(batch, channels, size, size), new(1, geometry.d_in, 1), new(1, geometry.d_in, geometry.d_in)
    one, none = (1, 1), torch.zeros(1, 1, device=device)
    ways = [
        partial(_gram_of_patches, x),
        partial(line_gram, x, (3, 3), one, one, one, 1, A),
        partial(correlation_gram, x, (3, 3), one, one, 1, A),
        partial(_product_of_patches, x, s[0]),
        partial(geometry._convolved_product, x, one, s, none),
        partial(geometry._shifted_product, x, one, s, none),
    ]
    return dict(zip(_HEAD[1:], ways, strict=True))


def _gram_of_patches(x: Tensor) -> Tensor:
    a = F.unfold(x, 3, padding=1).transpose(0, 1).flatten(1)
    return a @ a.T


def _product_of_patches(x: Tensor, s: Tensor) -> Tensor:
    a = F.unfold(x, 3, padding=1)
    return (a @ (a.mT @ s)).sum(0)


if __name__ == "__main__":
    main()
