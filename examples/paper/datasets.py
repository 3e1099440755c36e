"""Where data comes from: torchvision's data sets, scikit-learn, two files of Martens's, and the curves made here.

Files lie below one directory, ``--data-root``, as torchvision lays them out; the other two are expected at

    DATA_ROOT/FACES/newfaces_rot_single.mat    DATA_ROOT/CURVES/digs3pts_1.mat

``download=True`` fetches what is missing.
"""

from pathlib import Path
from typing import ClassVar

import torch
from scipy.io import loadmat
from torchvision.datasets import CIFAR10, CIFAR100, MNIST
from torchvision.datasets.utils import download_url

from examples.paper.curves import curve_images
from examples.paper.data import Data, Split

MARTENS = "http://www.cs.toronto.edu/~jmartens/"  # the paper's footnotes
FACES_FILE = Path("FACES/newfaces_rot_single.mat")
CURVES_FILE = Path("CURVES/digs3pts_1.mat")
FACES_TRAINING_IMAGES = 103_500


class MissingData(Exception):
    """A data set is not where it is expected; the message says where that is and where to get it."""


class _Cifar10(CIFAR10):
    # torchvision compares the checksum of each file at each start. The archive's is compared when it is downloaded.
    train_list: ClassVar = [[name, None] for name, _ in CIFAR10.train_list]
    test_list: ClassVar = [[name, None] for name, _ in CIFAR10.test_list]
    meta: ClassVar = {**CIFAR10.meta, "md5": None}


class _Cifar100(CIFAR100):
    train_list: ClassVar = [[name, None] for name, _ in CIFAR100.train_list]
    test_list: ClassVar = [[name, None] for name, _ in CIFAR100.test_list]
    meta: ClassVar = {**CIFAR100.meta, "md5": None}


def mnist_vectors(root: Path, download: bool) -> Data:
    """MNIST's 60,000 training images as vectors of 784 pixels; they are their own targets."""
    images = _torchvision(MNIST, root, True, download).data
    return Data(Split(images.flatten(1).float() / 255))


def mnist_images(root: Path, download: bool) -> Data:
    """MNIST with its labels; the test images are the validation set."""
    splits = [_torchvision(MNIST, root, train, download) for train in (True, False)]
    return Data(*(Split(s.data.unsqueeze(1), s.targets) for s in splits))


def cifar10(root: Path, download: bool) -> Data:
    """CIFAR-10; the test images are the validation set."""
    return _cifar(_Cifar10, root, download)


def cifar100(root: Path, download: bool) -> Data:
    """CIFAR-100; the test images are the validation set."""
    return _cifar(_Cifar100, root, download)


def faces(root: Path, download: bool) -> Data:
    """FACES's 103,500 training images as vectors of 625 pixels."""
    images = _mat(root / FACES_FILE, "newfaces_single", download).T
    return Data(Split(images[:FACES_TRAINING_IMAGES].contiguous()))


def curves(root: Path, download: bool) -> Data:
    """CURVES's 20,000 training images as vectors of 784 pixels."""
    return Data(Split(_mat(root / CURVES_FILE, "bdata", download)))


def generated_curves(root: Path, download: bool) -> Data:
    """20,000 images of the kind of CURVES."""
    return Data(Split(curve_images()))


def digits(root: Path, download: bool) -> Data:
    """scikit-learn's 1,797 handwritten digits as vectors of 64 pixels: a problem that takes seconds, without files."""
    from sklearn.datasets import load_digits

    return Data(Split(torch.from_numpy(load_digits().data).float() / 16))


def _cifar(kind: type[CIFAR10], root: Path, download: bool) -> Data:
    splits = [_torchvision(kind, root, train, download) for train in (True, False)]
    return Data(
        *(Split(torch.from_numpy(s.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(s.targets)) for s in splits)
    )


def _torchvision(kind: type, root: Path, train: bool, download: bool):
    try:
        return kind(str(root), train=train, download=download)
    except RuntimeError as error:  # what torchvision raises where there are no files
        name = kind.__name__.lstrip("_").upper()
        raise MissingData(
            f"{name} is not below {root.resolve()}. Give --data-root, or fetch it with --download."
        ) from error


def _mat(path: Path, key: str, download: bool) -> torch.Tensor:
    if not path.exists():
        if not download:
            raise MissingData(f"No file {path}. Fetch it with --download, or by hand from {MARTENS}{path.name}.")
        download_url(MARTENS + path.name, str(path.parent))
    return torch.from_numpy(loadmat(path)[key]).float()
