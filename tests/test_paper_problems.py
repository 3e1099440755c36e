"""The paper's problems: networks, losses, augmentation, data files."""

import pickle
import urllib.request
from http.client import IncompleteRead
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import nn

from tests.test_examples import write_mnist
from workloads import datasets
from workloads.augment import crop_and_flip
from workloads.curves import SIZE, curve_images
from workloads.data import Split
from workloads.datasets import MissingData
from workloads.losses import BINARY_CROSS_ENTROPY, SQUARED_ERROR
from workloads.problems import PROBLEMS


def layers(net: nn.Module, kind: type) -> list:
    return [m for m in net.modules() if isinstance(m, kind)]


@pytest.mark.parametrize(("name", "code"), [("mnist", 30), ("faces", 30), ("curves", 6)])
def test_the_code_layer_alone_has_no_relu(name: str, code: int) -> None:
    net = list(PROBLEMS[name].build())
    no_relu = [m.out_features for m, after in zip(net, [*net[1:], None], strict=True)
               if isinstance(m, nn.Linear) and not isinstance(after, nn.ReLU)]  # fmt: skip
    assert no_relu == [code, net[0].in_features]


def test_vgg16_is_model_d_with_batchnorm_and_one_linear_layer() -> None:
    net = PROBLEMS["vgg16-cifar100"].build()
    assert [len(layers(net, kind)) for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)] == [13, 13, 1]
    assert layers(net, nn.Linear)[0].in_features == 512
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 100)


def test_resnet32_has_he_et_al_s_size_and_no_parameters_in_shortcuts() -> None:
    net = PROBLEMS["resnet32-cifar10"].build()
    assert len(layers(net, nn.Conv2d)) + len(layers(net, nn.Linear)) == 32
    assert all(conv.bias is None for conv in layers(net, nn.Conv2d))
    assert sum(p.numel() for p in net.parameters()) == 464_154  # "0.46M" in their table
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_network_maps_its_inputs(name: str) -> None:
    problem = PROBLEMS[name]
    output = problem.build()(torch.rand(2, *problem.shape))
    assert output.shape == (2, problem.classes or problem.shape[0])


def test_losses_sum_over_pixels_and_average_over_data() -> None:
    output, target = torch.randn(5, 7), torch.rand(5, 7)
    p = output.sigmoid()
    entropy = -(target * p.log() + (1 - target) * (1 - p).log()).sum(1).mean()
    torch.testing.assert_close(BINARY_CROSS_ENTROPY.mean(output, target), entropy)
    torch.testing.assert_close(SQUARED_ERROR.mean(output, target), ((output - target) ** 2).sum(1).mean() / 2)


@pytest.mark.parametrize("loss", [BINARY_CROSS_ENTROPY, SQUARED_ERROR])
def test_sampled_targets_have_the_loss_s_second_derivative_as_gradient_covariance(loss) -> None:
    output = torch.randn(1, 3, requires_grad=True)
    n = 20_000
    many = output.detach().expand(n, -1).clone().requires_grad_()
    targets = loss.sample(many, torch.zeros(n, 3), torch.Generator().manual_seed(0))
    (g,) = torch.autograd.grad(loss.mean(many, targets) * n, many)
    hessian = torch.autograd.functional.hessian(lambda z: loss.mean(z, torch.zeros(1, 3)), output)[0, :, 0]
    torch.testing.assert_close(g.T @ g / n, hessian, atol=0.03, rtol=0.03)


def test_each_augmented_image_is_a_crop_and_half_are_mirrored() -> None:
    x = torch.rand(64, 3, 8, 8)
    padded = nn.functional.pad(x, [4] * 4)
    mirrored = 0
    for source, image in zip(padded, crop_and_flip(x), strict=True):
        crops = [source[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
        plain, flipped = ([torch.equal(c, image) for c in cs] for cs in (crops, [c.flip(2) for c in crops]))
        assert any(plain) or any(flipped)
        mirrored += any(flipped)
    assert 20 < mirrored < 44


@pytest.mark.parametrize("name", [pytest.param("curves-generated", marks=pytest.mark.slow), "digits"])
def test_no_pixel_is_subnormal(name: str) -> None:
    """A CPU multiplies these sixty times more slowly."""
    x = PROBLEMS[name].load(Path("."), False).train.x.float()
    assert not ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any()


def test_generated_curves_depend_on_the_seed_alone_and_pass_through_three_points() -> None:
    images = curve_images(50, seed=3)
    assert torch.equal(images, curve_images(50, seed=3))
    assert not torch.equal(images, curve_images(50, seed=4))
    assert images.shape == (50, SIZE * SIZE) and images.min() >= 0 and 0.9 < images.max() <= 1
    corners = 3.0 + 21.0 * torch.rand(50, 3, 2, generator=torch.Generator().manual_seed(3))
    row, column = corners.round().long().unbind(-1)
    at_corners = images.view(50, SIZE, SIZE)[torch.arange(50)[:, None], row, column]
    assert at_corners.min() > 0.6  # the pixel's centre is at most √½ away from the point


def test_an_epoch_has_each_datum_once_and_leaves_out_the_incomplete_minibatch() -> None:
    split = Split(torch.arange(10.0)[:, None])
    order = torch.randperm(10)
    batches = [x for x, _ in split.shuffled(order, 4)]
    assert [len(b) for b in batches] == [4, 4]
    assert len(torch.cat(batches).unique()) == 8
    (last,) = [x for x, _ in split.shuffled(order, 4, first=1)]
    assert torch.equal(last, batches[1])
    assert torch.equal(torch.cat([x for x, _ in split.in_order(4)]), split.x)


# ---------------------------------------------------------------------------------------------- files


def write_cifar10(root: Path, n: int = 20) -> None:
    """Made-up images in CIFAR-10's format: five training batches and a test batch."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {
            "data": random.integers(256, size=(n, 3072), dtype=np.uint8),
            "labels": list(random.integers(10, size=n)),
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def write_cifar100(root: Path, n: int = 100) -> None:
    """Made-up images in CIFAR-100's format."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("train", "test"):
        batch = {"data": random.integers(256, size=(n, 3072), dtype=np.uint8), "fine_labels": list(range(n))}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


def test_cifar_is_read_in_its_own_format(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    ten, hundred = datasets.cifar10(tmp_path, False), datasets.cifar100(tmp_path, False)
    assert len(ten.train) == 100 and len(ten.valid) == 20 and len(hundred.train) == 100
    raw = pickle.loads((tmp_path / "cifar-10-batches-py/data_batch_1").read_bytes())["data"][0]
    assert np.array_equal(ten.train.x[0].numpy().ravel(), raw)  # channels first, as on disk
    assert hundred.train.y.tolist() == list(range(100))


def test_faces_and_curves_are_read_from_their_mat_files(tmp_path: Path) -> None:
    faces, curves = np.random.rand(625, 4).astype("float32"), np.random.rand(3, 784)
    for path, content in ((datasets.FACES_FILE, {"newfaces_single": faces}), (datasets.CURVES_FILE, {"bdata": curves})):
        (tmp_path / path).parent.mkdir()
        savemat(tmp_path / path, content)
    assert np.allclose(datasets.faces(tmp_path, False).train.x.numpy(), faces.T)
    assert np.allclose(datasets.curves(tmp_path, False).train.x.numpy(), curves)


WITH_FILES = ["mnist", "vgg8-mnist", "faces", "curves", "vgg16-cifar10", "resnet32-cifar100"]


@pytest.mark.parametrize("name", WITH_FILES)
def test_missing_data_say_where_they_belong(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--download") as error:
        PROBLEMS[name].load(tmp_path, False)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", WITH_FILES)
@pytest.mark.parametrize("error", [URLError("no network"), ConnectionResetError("hung up"), IncompleteRead(b"")])
def test_a_download_that_fails_says_from_where_and_why_and_leaves_no_data(
    name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(*args, **options):
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(MissingData, match=r"could not be downloaded from https?://\S+") as refusal:
        PROBLEMS[name].load(tmp_path, True)
    message = str(refusal.value)
    assert str(error) in message and str(tmp_path) in message and "\n" not in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_download_that_is_killed_leaves_nothing_under_the_file_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(url: str, root: str, name: str) -> None:
        Path(root).mkdir()
        Path(root, name).write_bytes(b"the beginning")
        raise KeyboardInterrupt

    monkeypatch.setattr("torchvision.datasets.utils.download_url", killed)
    with pytest.raises(KeyboardInterrupt):
        datasets.curves(tmp_path, True)
    assert not (tmp_path / datasets.CURVES_FILE).exists()

    def whole(url: str, root: str, name: str) -> None:
        savemat(Path(root, name), {"bdata": np.ones((3, 784))}, appendmat=False)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", whole)
    assert len(datasets.curves(tmp_path, True).train) == 3
    assert [path.name for path in (tmp_path / "CURVES").iterdir()] == [datasets.CURVES_FILE.name]


@pytest.mark.parametrize("name", WITH_FILES)
@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("length", [0, 10, 200])
def test_data_that_were_cut_short_say_what_to_do(name: str, download: bool, length: int, tmp_path: Path) -> None:
    _write_all(tmp_path)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(MissingData, match=r"can't be read .*Delete it, and fetch it with --download") as error:
        PROBLEMS[name].load(tmp_path, download)
    assert str(tmp_path) in str(error.value)


def _write_all(root: Path) -> None:
    write_cifar10(root)
    write_cifar100(root)
    write_mnist(root / "MNIST/raw")
    for path, name in ((datasets.FACES_FILE, "newfaces_single"), (datasets.CURVES_FILE, "bdata")):
        (root / path).parent.mkdir()
        savemat(root / path, {name: np.random.rand(30, 30)})
