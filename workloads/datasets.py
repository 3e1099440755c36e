"""Where data comes from: torchvision's data sets, scikit-learn, two files of Martens's, and the curves made here.

Files lie below one directory, ``--data-root``, as torchvision lays them out; the other two are expected at

    DATA_ROOT/FACES/newfaces_rot_single.mat    DATA_ROOT/CURVES/digs3pts_1.mat

``download=True`` fetches what is missing. A library is imported by the data that need it, since that takes seconds.
"""

import os
from http.client import HTTPException
from pathlib import Path

import torch

from workloads.curves import curve_images
from workloads.data import Data, Split

MARTENS = "http://www.cs.toronto.edu/~jmartens/"  # the paper's footnotes
FACES_FILE = Path("FACES/newfaces_rot_single.mat")
CURVES_FILE = Path("CURVES/digs3pts_1.mat")
FACES_TRAINING_IMAGES = 103_500


class MissingData(Exception):
    """A data set can't be had; the message says where it belongs, what is wrong, and where to get it."""


def mnist_vectors(root: Path, download: bool) -> Data:
    """MNIST's 60,000 training images as vectors of 784 pixels; they are their own targets."""
    from torchvision.datasets import MNIST

    images = _torchvision(MNIST, root, True, download).data
    return Data(Split(images.flatten(1).float() / 255))


def mnist_images(root: Path, download: bool) -> Data:
    """MNIST with its labels; the test images are the validation set."""
    from torchvision.datasets import MNIST

    splits = [_torchvision(MNIST, root, train, download) for train in (True, False)]
    return Data(*(Split(s.data.unsqueeze(1), s.targets) for s in splits))


def cifar10(root: Path, download: bool) -> Data:
    """CIFAR-10; the test images are the validation set."""
    from workloads.cifar import Cifar10

    return _cifar(Cifar10, root, download)


def cifar100(root: Path, download: bool) -> Data:
    """CIFAR-100; the test images are the validation set."""
    from workloads.cifar import Cifar100

    return _cifar(Cifar100, root, download)


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


def _cifar(kind: type, root: Path, download: bool) -> Data:
    splits = [_torchvision(kind, root, train, download) for train in (True, False)]
    return Data(
        *(Split(torch.from_numpy(s.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(s.targets)) for s in splits)
    )


def _torchvision(kind: type, root: Path, train: bool, download: bool):
    try:
        return kind(str(root), train=train, download=download)
    except Exception as error:  # whatever torchvision, the network, archives and pickles raise
        raise MissingData(_why(kind, root, download, error)) from error


def _why(kind: type, root: Path, download: bool, error: Exception) -> str:
    name = kind.__name__.upper()
    folder, files, source = _layout(kind)
    if all((root / folder / file).is_file() for file in files):
        return _unreadable(root.resolve() / folder, error)
    if not download:
        return f"{name} is not below {root.resolve()}. Give --data-root, or fetch it with --download."
    return _not_downloaded(root.resolve() / folder, source, error)


def _layout(kind: type) -> tuple[Path, list[str], str]:
    """Folder of a data set of torchvision, names of its files, and where it comes from."""
    if hasattr(kind, "mirrors"):  # MNIST, that is
        return Path("MNIST/raw"), [Path(name).stem for name, _ in kind.resources], " or ".join(kind.mirrors)
    names = [name for name, _ in kind.train_list + kind.test_list]
    return Path(kind.base_folder), [*names, kind.meta["filename"]], kind.url


def _mat(path: Path, key: str, download: bool) -> torch.Tensor:
    if not path.exists():
        if not download:
            raise MissingData(f"No file {path}. Fetch it with --download, or by hand from {MARTENS}{path.name}.")
        _fetch(MARTENS + path.name, path)
    from scipy.io import loadmat

    try:
        return torch.from_numpy(loadmat(path)[key]).float()
    except Exception as error:  # whatever a file that was cut short, or is another, makes scipy raise
        raise MissingData(_unreadable(path.resolve(), error)) from error


def _fetch(url: str, path: Path) -> None:
    """Download to another name first: a file that has its own name is whole."""
    from torchvision.datasets.utils import download_url

    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        download_url(url, str(part.parent), part.name)
        part.replace(path)
    except (OSError, HTTPException, RuntimeError) as error:
        raise MissingData(_not_downloaded(path.resolve(), url, error)) from error
    finally:
        part.unlink(missing_ok=True)


def _not_downloaded(path: Path, url: str, error: Exception) -> str:
    return f"{path} could not be downloaded from {url}: {_reason(error)}. Try again, or copy it there by hand."


def _unreadable(path: Path, error: Exception) -> str:
    return (
        f"{path} can't be read ({_reason(error)}): it is not what it should be, or was cut short. Delete it, and fetch "
        "it with --download."
    )


def _reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
