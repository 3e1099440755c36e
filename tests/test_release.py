"""What is released: a source distribution that can be tested, a wheel with the package alone, one version."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kfqn_ext

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files that git knows of, or is about to."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there is nothing to compare with")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist and the wheel of a copy of the checkout."""
    copy, out = (tmp_path_factory.mktemp(name) for name in ("copy", "out"))
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    build = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_the_sdist_has_all_files_of_the_checkout(built: Path, tracked: list[str]) -> None:
    """Tests, and what they read: examples, benchmarks, documentation, logs."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in names if name.startswith("kfqn_ext.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == set(tracked)
    assert {"CHANGELOG.md", "CITATION.cff", "tests/conftest.py", "docs/design.md", "examples/quickstart.py"} <= names


def test_the_wheel_has_the_package_alone(built: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tracked if name.startswith("kfqn_ext/")}


def test_there_is_one_version(built: Path) -> None:
    """That of ``kfqn_ext/__init__.py``, which pyproject.toml reads; CITATION.cff can only repeat it."""
    version = kfqn_ext.__version__
    assert {path.name.split("-")[1].removesuffix(".tar.gz") for path in built.iterdir()} == {version}
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M) == [version]
    assert re.search(r"^version *=", (ROOT / "pyproject.toml").read_text(), re.M)[0] == "version ="  # of [tool...]
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_pythons_that_are_claimed_one_by_one_were_tested(built: Path) -> None:
    """A classifier for a version of Python is a promise: the one that runs these tests is among them."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        text = archive.extractfile(f"kfqn_ext-{kfqn_ext.__version__}/PKG-INFO").read().decode()
    claimed = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", text, re.M)
    assert claimed == ["3.11", "3.13"]
    assert re.findall(r"^Project-URL: (\w+), https://", text, re.M) == ["Paper", "BackPACK"]
