"""What a stranger meets first: what things print as, what a type checker makes of them, what commands say."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backpack import backpack
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KFAC, InputGram, KBFGSQuantities, KFACFactors, Minibatch, extend
from tests.installed_check import MYPY, USER

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


@pytest.mark.slow
def test_a_users_file_passes_mypy_strict(tmp_path: Path) -> None:
    """And a type that is wrong does not."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(USER.replace(".step(), None", ".step(), Tensor"))
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache/user"), "user.py", "wrong.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}  # an editable installation is found by imports alone
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *errors, _ = done.stdout.splitlines()
    assert len(errors) == 1 and errors[0].startswith("wrong.py:") and "[assert-type]" in errors[0], done.stdout


# ------------------------------------------------------------------ the commands of the examples


MISSING = """
import runpy, sys
class Missing:
    def find_spec(name, *rest):
        if name == {!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing)
"""


def python(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script or ``-m`` module as a person does, where a library may not be installed."""
    name, *rest = arguments
    start = f"runpy.run_path({name!r}, run_name='__main__')"
    if name == "-m":
        start = f"runpy.run_module({rest.pop(0)!r}, run_name='__main__', alter_sys=True)"
    program = MISSING.format(without) + f"sys.argv[1:] = {rest}\nsys.path[0] = {str(Path(name).parent)!r}\n"
    return subprocess.run([sys.executable, "-c", program + start], cwd=ROOT, capture_output=True, text=True)


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_of_the_papers_experiments_takes_little_more_than_torch() -> None:
    """In one of three tries: another program beside it makes a second of one several of the next."""
    tries = (cpu_seconds("-m", "examples.paper", "--help") - cpu_seconds("-c", "import torch") for _ in range(3))
    assert any(more < 1.5 for more in tries)


def test_help_of_the_papers_experiments_imports_what_it_needs() -> None:
    heavy = {"matplotlib", "pandas", "scipy", "sklearn", "torchvision", "torch._dynamo"}
    code = "from examples.paper.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nimport sys\n"
    command = [sys.executable, "-c", code + f"print('found', sorted({heavy} & set(sys.modules)))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "found []"


@pytest.mark.slow
def test_a_table_of_eight_cells_of_a_second_takes_25_seconds_of_the_processor(tmp_path: Path) -> None:
    table = ["-m", "examples.paper", "table", "digits", "--methods", "kbfgs", "kbfgsl", "adam", "sgdm", "--seeds", "2"]
    assert cpu_seconds(*table, "--seconds", "1", "--threads", "1", "--out", str(tmp_path)) < 25


# torch where another would do as well: a second less a test.
RUNS = ["-m", "examples.paper"]
WANTING = [
    ("tyro", [*RUNS, "--help"]),
    ("filelock", [*RUNS, "run", "--help"]),
    ("torchvision", [*RUNS, "run", "--problem", "mnist", "--method", "adam", "--best", "--out", "log.jsonl"]),
    ("sklearn", [*RUNS, "run", "--problem", "digits", "--method", "adam", "--best", "--out", "log.jsonl"]),
    ("pandas", ["-m", "examples.paper.rows", "results/curves-generated.jsonl"]),
    ("matplotlib", [*RUNS, "report", "results/curves-generated.jsonl"]),
    ("matplotlib", ["examples/quickstart.py"]),
    ("torch", ["examples/mnist_cnn.py"]),
    ("torch", ["examples/distributed_cnn.py"]),
    ("torch", ["examples/hessian_ladder.py"]),
    ("torch", ["examples/learning_the_inverse.py"]),
    ("torch", ["examples/provable_convergence.py"]),
    ("accelerate", ["examples/loops/accelerate_loop.py"]),
    ("torch", ["examples/loops/drop_in.py"]),
    ("transformers", ["examples/loops/hugging_face.py"]),
    ("lightning", ["examples/loops/lightning_automatic.py"]),
    ("lightning", ["examples/loops/lightning_loop.py"]),
]


# Of each library, the commands after the first are slow.
MISSES = [
    pytest.param(
        n, c, marks=pytest.mark.slow if n in dict(WANTING[:i]) else (), id=f"{n}-{c[2] if c[0] == '-m' else c[0]}"
    )
    for i, (n, c) in enumerate(WANTING)
]


@pytest.mark.parametrize(("library", "command"), MISSES)
def test_an_example_without_its_extras_says_what_to_install(library: str, command: list[str]) -> None:
    done = python(*command, without=library)
    assert done.returncode == 1
    assert done.stderr == f'{library} is not installed. In the checkout: pip install -e ".[examples]"\n'


def test_every_example_is_among_these() -> None:
    scripts = {
        str(path.relative_to(ROOT))
        for folder in ("examples", "examples/loops")
        for path in (ROOT / folder).glob("*.py")
    }
    # These need torch alone; the logger says itself which library it wants.
    plain = ("accumulation", "closure", "logging_curvature", "mixed_precision", "plain", "resume")
    assert scripts - {command[0] for _, command in WANTING} == {f"examples/loops/{name}.py" for name in plain}
