"""A step on the meta device, whose tensors have shapes and no numbers: as on a GPU, nothing is read and nothing moves.

What a GPU has and the meta device has not is replaced: random targets, and the checks at the start that may wait.
"""

from traceback import extract_stack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kfqn_ext.optim import Minibatch, gate
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import replay, snapshot
from kfqn_ext.optim.preconditioner import block, normalized
from tests.optim.family import varied
from tests.optim.test_no_waiting import make, net


class OneDevice(TorchDispatchMode):
    """Collects operations that see or make tensors of several devices, with the line that asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            self.found += [f"{func}: {f.filename}:{f.lineno}" for f in extract_stack() if "kfqn_ext" in f.filename][-1:]
        return result


@pytest.fixture(autouse=True)
def what_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block, normalized):
        monkeypatch.setattr(module, "bool", lambda value: isinstance(value, Tensor) or bool(value), raising=False)
    monkeypatch.setattr(LateWarning, "note", lambda self, flag: None)
    monkeypatch.setattr(replay, "_LOOKS", 0)
    monkeypatch.setattr(snapshot, "is_on_host", lambda t: False)
    generator = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: generator)


def on_meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(("name", "option"), varied("weight decay", "rate a tensor"))  # the rate is on the host, there
def test_a_step_stays_on_its_device(name: str, option: str) -> None:
    with torch.device("meta"):
        model = net()
    optimizer = make(name, option, model)
    targets = torch.empty(8, dtype=torch.int64, device="meta")
    with OneDevice() as devices:
        for _ in range(5):
            optimizer.step(Minibatch(model, F.cross_entropy, on_meta(8, 2, 7, 7), targets))
    assert devices.found == []
    held = {key: value.device.type for state in optimizer.state.values() for key, value in state.items()}
    assert {key for key, device in held.items() if device != "meta"} <= {"num_locations"}


def test_it_sees_a_tensor_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, device="meta"))
    optimizer = make("KBFGS", "plain", model)
    batch = Minibatch(model, F.mse_loss, on_meta(8, 4), on_meta(8, 3))
    for _ in range(2):
        optimizer.step(batch)
    # torch lets such numbers take part, and moves them each time.
    monkeypatch.setattr(gate.Gate, "_number", lambda self, value, like: torch.tensor(value))
    with OneDevice() as devices:
        optimizer.step(batch)
    assert devices.found
