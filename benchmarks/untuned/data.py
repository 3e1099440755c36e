"""Data for all problems: images, program text, a photograph, and tables made by a rule."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.data import Data, Split
from workloads.datasets import mnist_images

# Long modules of the standard library, of which there is plenty in each version of Python.
_MODULES = ("doctest", "difflib", "argparse")
_CHARACTERS = 60_000  # of each of them
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_UNKNOWN = ALPHABET.index("?")
_IMAGES = 1000  # for validation


@dataclass(frozen=True)
class Source:
    """Where images come from.

    Attributes:
        root: Folder of torchvision's data sets, which are downloaded where they are missing.
        quick: Enlarged 8×8 digits of scikit-learn instead of MNIST, so that nothing is downloaded.
    """

    root: Path = Path("data")
    quick: bool = False


def split(x: Tensor, y: Tensor, valid: int) -> Data:
    """The last ones are for validation."""
    return Data(Split(x[:-valid], y[:-valid]), Split(x[-valid:], y[-valid:]))


@cache
def images(source: Source, number: int, size: int) -> Data:
    """Grey images [n, 1, size, size] between 0 and 1, and their classes."""
    data = digits() if source.quick else mnist_images(source.root, download=True)
    return Data(_resized(data.train.first(number), size), _resized(data.valid.first(_IMAGES), size))


def _resized(split: Split, size: int) -> Split:
    x, y = split.batch(slice(None))
    if size > x.shape[-1]:
        return Split(F.interpolate(x, size=(size, size), mode="bilinear"), y)
    return Split(F.avg_pool2d(x, x.shape[-1] // size), y)


def pixels(source: Source, number: int, size: int) -> Data:
    """Images as rows of pixels which are their own targets."""
    data = images(source, number, size)
    return Data(Split(data.train.x.flatten(1)), Split(data.valid.x.flatten(1)))


@cache
def digits() -> Data:
    """The 8×8 digits of scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return split(x, torch.tensor(found.target), 297)


@cache
def program_text(length: int) -> Data:
    """Characters of Python's standard library, and each one's successor; the last tenth is for validation.

    Another version of Python has another text, though one that is as hard to learn.
    """
    texts = [Path(find_spec(name).origin).read_text(encoding="utf-8")[:_CHARACTERS] for name in _MODULES]
    code = {character: number for number, character in enumerate(ALPHABET)}
    text = torch.tensor([code.get(character, _UNKNOWN) for character in "".join(texts)])
    train, valid = text[: -len(text) // 10], text[-len(text) // 10 :]
    windows, apart = train.unfold(0, length + 1, 1), valid.unfold(0, length + 1, length)[:200]
    return Data(*(Split(part[:, :-1], part[:, 1:]) for part in (windows, apart)))


@cache
def badly_scaled() -> Data:
    """Twenty inputs whose sizes span two orders of magnitude, and a smooth function of them, of unit variance."""
    generator = torch.Generator().manual_seed(0)
    z, first, second = (torch.randn(*shape, generator=generator) for shape in ((21_000, 20), (20, 5), (5, 1)))
    y = torch.tanh(z @ first / 20**0.5) @ second
    return split(z * torch.logspace(-1, 1, 20), (y - y.mean()) / y.std(), 1000)


@cache
def photograph() -> Data:
    """Places in [-1, 1]² and a photograph's brightness there; every fifth pixel is for validation."""
    from sklearn.datasets import load_sample_image

    grey = torch.tensor(load_sample_image("china.jpg"), dtype=torch.float32).mean(2) / 255
    grey = F.adaptive_avg_pool2d(grey.unsqueeze(0), (107, 160))[0]
    rows, columns = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grey.shape), indexing="ij")
    x, y = torch.stack([rows.flatten(), columns.flatten()], 1), (2 * grey - 1).flatten().unsqueeze(1)
    apart = torch.arange(len(x)) % 5 == 2
    return Data(Split(x[~apart], y[~apart]), Split(x[apart], y[apart]))


CARDINALITIES = (3, 5, 8, 12, 20, 40)
NUMBERS, CLASSES = 8, 3


@cache
def table() -> Data:
    """Columns of numbers with long tails, then of categories; the class is the largest of three random scores."""
    generator = torch.Generator().manual_seed(0)
    rows = 7000
    z = torch.randn(rows, NUMBERS, generator=generator)
    categories = [torch.randint(n, (rows,), generator=generator) for n in CARDINALITIES]
    embedded = sum(
        torch.randn(n, NUMBERS, generator=generator)[category]
        for n, category in zip(CARDINALITIES, categories, strict=True)
    )
    mixing = torch.randn(NUMBERS, CLASSES, generator=generator)
    scores = (torch.sin(2 * z) * embedded + z) @ mixing + 0.3 * torch.randn(rows, CLASSES, generator=generator)
    return split(torch.cat([z.exp(), torch.stack(categories, 1).float()], 1), scores.argmax(1), 1000)
