"""What a stranger meets first: what things print as, what a type checker makes of them, what commands say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backpack import backpack
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KFAC, InputGram, KBFGSQuantities, KFACFactors, Minibatch, extend

ROOT = Path(__file__).parents[1]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, 1, 6, 6), torch.arange(8)


# ------------------------------------------------------------------ what is printed


def test_quantities_print_as_one_line_of_shapes() -> None:
    """And so does all that they hold."""
    model, (x, y) = extend(net()), data()
    extensions = [KBFGSQuantities(), KFACFactors(), InputGram()]
    with backpack(*extensions):
        cross_entropy(model(x), y).backward()
    results = [extension[model[0]] for extension in extensions]
    for shown in (*results, *(value for result in results for value in vars(result).values()), results[0].A):
        assert isinstance(shown, torch.Tensor) or "\n" not in str(shown)
    for result in results:
        assert "tensor(" not in str(result) and len(str(result)) < 250


@pytest.mark.parametrize("make", [KBFGS, KFAC])
def test_inverses_print_as_one_line_of_shapes(make: type) -> None:
    model = net()
    optimizer = make(model)
    optimizer.step(Minibatch(model, cross_entropy, *data()))
    held = optimizer.inverses(model[0].weight)
    assert str(held) == f"Inverses(H_A=[10, 10], H_G=[4, 4], fisher={make is KFAC})"
    assert str(held.H_A) == "SymmetricOperator([10, 10])"


# ------------------------------------------------------------------ what a type checker says

USER = """
from typing import assert_type

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KBFGSQuantities, Minibatch, extend
from kfqn_ext.extensions import GramOperator, LayerMoments

layer = nn.Linear(4, 3)
model = extend(nn.Sequential(layer))
x, y = torch.rand(8, 4), torch.randint(3, (8,))
moments = KBFGSQuantities()
with backpack(moments):
    torch.autograd.backward(cross_entropy(model(x), y))
assert_type(moments.get(layer), LayerMoments | None)
assert_type(moments[layer].A, GramOperator)
assert_type(moments[layer].A @ moments[layer].a_bar, Tensor)
optimizer = KBFGS(model, lr=0.1)
assert_type(optimizer.step(Minibatch(model, cross_entropy, x, y)), Tensor)
assert_type(optimizer.step(), None)
flat: dict[str, int | float] = optimizer.diagnostics().as_dict()
"""


def test_a_users_file_passes_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    # BackPACK has no types; what is said of its own functions is no concern of a user's.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-backpack.*]\nignore_missing_imports = True\n")
    done = mypy(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_would_have_seen_a_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER.replace("optimizer.step(), None", "optimizer.step(), Tensor"))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-backpack.*]\nignore_missing_imports = True\n")
    assert "assert-type" in mypy(tmp_path).stdout


def mypy(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "user.py"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)
