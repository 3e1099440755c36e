"""What an import costs: nothing is loaded that the code does not use, torch's compiler least of all."""

import subprocess
import sys

import pytest

TRAINING = """
import torch
from backpack import backpack
from kfqn_ext import KBFGSQuantities, extend, unextend
model, moments = extend(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))), KBFGSQuantities()
with backpack(moments):
    model(torch.rand(5, 3)).sum().backward()
assert moments[model[0]].num_data == 5
from kfqn_ext.optim import KBFGS
"""
COMPILER = "torch._dynamo"  # a second, as much as all of torch


def loaded(code: str) -> set[str]:
    """The modules that a fresh process has after some code, by its own account."""
    report = "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_eager_training_does_not_load_the_compiler() -> None:
    modules = loaded(TRAINING)
    assert "kfqn_ext" in modules and COMPILER not in modules
    assert not modules & {"matplotlib", "pandas", "scipy", "torchvision", "kfqn_ext.curvature"}


def test_building_an_optimizer_loads_what_torchs_own_does() -> None:
    build = "import torch; from {} import {} as O; O({}, lr=0.1)"
    stock = loaded(build.format("torch.optim", "SGD", "torch.nn.Linear(3, 2).parameters()"))
    ours = loaded(build.format("kfqn_ext", "KBFGS", "torch.nn.Linear(3, 2), damping=0.3"))
    assert (COMPILER in ours) <= (COMPILER in stock)


def test_parts_are_loaded_when_they_are_named() -> None:
    parts = ("extensions", "optim", "curvature")
    modules = loaded("import kfqn_ext" + "".join(f"; assert kfqn_ext.{part}.__all__" for part in parts))
    assert modules >= {f"kfqn_ext.{part}" for part in parts}


def test_there_is_nothing_else_to_find() -> None:
    import kfqn_ext

    assert "curvature" in dir(kfqn_ext)
    with pytest.raises(AttributeError, match="module 'kfqn_ext' has no attribute 'curvatures'"):
        kfqn_ext.curvatures  # noqa: B018
