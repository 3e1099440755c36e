"""An interrupted run, resumed in a new process, equals the uninterrupted one bit for bit."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.preconditioner import rounded
from tests.optim.family import FAMILY, OPTIONS, classes, firsts

STEPS, INTERRUPTED = 10, 5  # curvature is due on every third step: not at the interruption
CASES = [
    *((name, "plain") for name in FAMILY),
    *(
        (name, option)
        for option in ("bfloat16 direction", "weight decay")
        for name in firsts(lambda member: member.recipe.second_pass)
    ),
    *(
        (name, option)
        for option in ("groups", "weights and biases")
        for name in firsts(lambda member: member.recipe.second_pass)
    ),
]
QUICK = [(name, "plain") for name in classes()]  # in every dtype


def make(name: str, option: str, model: nn.Sequential) -> Any:
    options: dict[str, Any] = {"lr": 0.05, "T": 3, **OPTIONS.get(option, {})}
    if FAMILY[name].takes("inverse_update_freq"):
        options["inverse_update_freq"] = 2
    if option == "groups":
        rest = [p for layer in model[1:] for p in layer.parameters()]
        first = {"params": list(model[0].parameters()), "lr": 0.02, FAMILY[name].T: 1}
        options["params"] = [first, {"params": rest, FAMILY[name].T: 2}]
    if option == "weights and biases":
        of_both = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        options["params"] = [{"params": p, "weight_decay": 0.1 / i} for i, p in enumerate(of_both, start=1)]
    return FAMILY[name].make(model, **options)


class Run:
    """A model, its optimizer and a schedule."""

    def __init__(self, name: str, option: str, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(36, 3)
        ).to(dtype)
        self.optimizer = make(name, option, self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            x = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(step))
            x = x.to(next(self.model.parameters()).dtype)
            self.optimizer.step(Minibatch(self.model, F.cross_entropy, x, torch.arange(8) % 3))
            self.schedule.step()

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def resume(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.schedule.load_state_dict(checkpoint["schedule"])
        torch.set_rng_state(checkpoint["rng"])


def assert_identical(got: Any, want: Any, path: str = "") -> None:
    """Bit for bit, with dtypes."""
    assert type(got) is type(want), path
    if isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            assert_identical(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_identical(a, b, f"{path}[{i}]")
    elif isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want), path
    else:
        assert got == want, path


def test_resumed_in_a_new_process(tmp_path: Path) -> None:
    want = {}
    for name, option in CASES:
        run = Run(name, option, seed=0)
        run.train(0, INTERRUPTED)
        torch.save(run.checkpoint(), tmp_path / f"{name}, {option}.interrupted")
        run.train(INTERRUPTED, STEPS)
        want[name, option] = copy.deepcopy(run.checkpoint())
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-W", "error", __file__, str(tmp_path), str(torch.get_num_threads())],
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=120,
    )
    for name, option in CASES:
        finished = torch.load(tmp_path / f"{name}, {option}.finished", weights_only=True)
        assert_identical(finished, want[name, option], f"{name}, {option}")


def in_new_process(folder: Path) -> None:
    for name, option in CASES:
        run = Run(name, option, seed=1)  # nothing of the old run but what was saved
        run.resume(torch.load(folder / f"{name}, {option}.interrupted", weights_only=True))
        run.train(INTERRUPTED, STEPS)
        torch.save(run.checkpoint(), folder / f"{name}, {option}.finished")


@pytest.mark.parametrize(
    ("name", "option", "dtype"),
    [
        pytest.param(*case, dtype, marks=() if case in QUICK or dtype == torch.float32 else pytest.mark.slow)
        for case in CASES
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ],
)
def test_state_is_the_same_after_a_round_trip(name: str, option: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where parameters are bfloat16: torch would cast H to that."""
    run, other = Run(name, option, 0, dtype), Run(name, option, 1, dtype)
    run.train(0, 4)
    torch.save(run.checkpoint(), tmp_path / "state")
    other.resume(torch.load(tmp_path / "state", weights_only=True))
    assert_identical(other.checkpoint(), run.checkpoint())
    working = torch.promote_types(dtype, torch.float32)
    for state in run.optimizer.state_dict()["state"].values():
        assert {v.dtype for v in state.values() if isinstance(v, Tensor)} <= {working, torch.float32, torch.int64}
    for one in (run, other):  # and both go on alike
        torch.manual_seed(3)
        one.train(4, 7)
    assert_identical(other.checkpoint(), run.checkpoint())


def test_loaded_state_is_a_copy() -> None:
    run, other = Run("KBFGS", "plain", 0), Run("KBFGS", "plain", 0)
    run.train(0, 4)
    saved = run.checkpoint()
    other.resume(saved)
    before = copy.deepcopy(saved)
    other.train(4, 8)
    assert_identical(saved, before)


def test_a_state_of_before_the_first_step_can_be_loaded() -> None:
    run, other = Run("KBFGSL", "plain", 0), Run("KBFGSL", "plain", 1)
    other.train(0, 3)
    other.resume(copy.deepcopy(run.checkpoint()))
    for one in (run, other):
        torch.manual_seed(3)
        one.train(0, 4)
    assert_identical(other.checkpoint(), run.checkpoint())


if __name__ == "__main__":
    rounded.multiplies_bfloat16 = lambda device: True  # as in the process that the tests run in: see conftest.py
    torch.set_num_threads(int(sys.argv[2]))
    in_new_process(Path(sys.argv[1]))
