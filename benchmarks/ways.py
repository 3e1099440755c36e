"""Ways to A and to A s of a convolution, and to products with few vectors: ``python -m benchmarks.ways``.

The usual one, by patches that ``F.unfold`` writes out, beside those among which ``kfqn_ext.geometry`` chooses by the
layer's shape and by how many columns s has. 3×3 kernels, 128 images. Then A s of a linear layer and a product with H,
of vectors that stand as columns and as rows. Milliseconds of process time, medians, one thread.
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
from kfqn_ext.linalg import few_columns

# Channels, height and width, and groups.
SIZES = (
    *((1, 28, 1), (3, 32, 1), (16, 32, 1), (32, 16, 1), (64, 8, 1), (128, 16, 1), (256, 8, 1)),
    *((64, 32, 64), (64, 16, 16), (128, 8, 8)),
)
COLUMNS = (1, 5)  # of s: one for the mean input, as in the paper, or four more, as by default
VECTORS = ((128, 65, 5), (1000, 785, 5), (1000, 785, 2), (1000, 785, 1), (4096, 577, 5))  # data, inputs, how many
_HEAD = ["channels of", "A: patches", "lines", "correlations", "A s: patches", "convolution", "shifts"]
_HEAD += [f"{way}, {COLUMNS[1]} columns" for way in _HEAD[-2:]]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {name(*shape): [milliseconds(run) for run in runs(args.batch, *shape).values()] for shape in SIZES}
    few = [[*shape, *map(milliseconds, few_vectors(*shape))] for shape in VECTORS]
    options.finish(args, "ways", torch.device("cpu"), {"milliseconds": found, "vectors": few}, render)


def render(results: dict[str, Any]) -> str:
    """A row a layer, and one for each number of vectors."""
    layers = [_HEAD, *([layer, *_texts(row)] for layer, row in results["milliseconds"].items())]
    vectors = [["inputs, vectors", "A s: columns", "rows", "H s: columns", "rows"]]
    vectors += [[f"{data}×{d}, {k}", *_texts(row)] for data, d, k, *row in results["vectors"]]
    return f"{markdown(layers)}\n\n{markdown(vectors)}"


def _texts(row: Sequence[float]) -> list[str]:
    return [f"{ms:.2f}" for ms in row]


def name(channels: int, size: int, groups: int) -> str:
    """What a layer is called in the table."""
    return f"{channels} of {size}×{size}" + (f", {groups} groups" if groups > 1 else "")


def runs(
    batch: int, channels: int, size: int, groups: int = 1, device: torch.device | None = None
) -> dict[str, Callable[[], object]]:
    """All ways for one layer, by their names in the table."""
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
    geometry = cast(ConvGeometry, geometry_of(layer))
    new, d = partial(torch.randn, device=device), geometry.d_in
    x, A = new(batch, channels, size, size), new(groups, d, d)
    (s, none), (several, nones) = ((new(groups, k, d).mT, torch.zeros(groups, k, device=device)) for k in COLUMNS)
    one = (1, 1)
    ways = [
        partial(_gram_of_patches, x, groups),
        partial(line_gram, x, (3, 3), one, one, one, groups, A),
        partial(correlation_gram, x, (3, 3), one, one, groups, A),
        partial(_product_of_patches, x, s),
        partial(geometry._convolved_product, x, one, s, none),
        partial(geometry._shifted_product, x, one, s, none),
        partial(geometry._convolved_product, x, one, several, nones),
        partial(geometry._shifted_product, x, one, several, nones),
    ]
    return dict(zip(_HEAD[1:], ways, strict=True))


def few_vectors(data: int, d: int, k: int) -> list[Callable[[], object]]:
    """xᵀx s and H s, each with s as k columns and as k rows."""
    x, H, s = torch.randn(data, d), torch.randn(d, d), torch.randn(d, k)
    rows = s.mT.contiguous().mT
    return [
        lambda: x.mT @ (x @ s),
        partial(few_columns.gram_product, x, rows),
        lambda: H @ s,
        partial(few_columns.product, H, rows),
    ]


def _patches(x: Tensor, groups: int) -> Tensor:
    """[N, G, d, T], whatever torch copies for it."""
    return F.unfold(x, 3, padding=1).unflatten(1, (groups, -1))


def _gram_of_patches(x: Tensor, groups: int) -> Tensor:
    a = _patches(x, groups).permute(1, 2, 0, 3).flatten(2)
    return a @ a.mT


def _product_of_patches(x: Tensor, s: Tensor) -> Tensor:
    a = _patches(x, len(s))
    return (a @ (a.mT @ s)).sum(0)


if __name__ == "__main__":
    main()
