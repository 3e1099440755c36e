"""In steady state a step never reads a number back from the device: no ``.item()``, no ``if`` on a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfqn_ext.linalg import kronecker
from kfqn_ext.optim import Minibatch, gate
from kfqn_ext.optim.groups import validation
from kfqn_ext.optim.inverses import averages
from kfqn_ext.optim.late_warning import LateWarning
from kfqn_ext.optim.passes import snapshot
from kfqn_ext.optim.preconditioner import guard
from tests.optim.family import FAMILY, OPTIONS, classes, varied

each = pytest.mark.parametrize(("name", "option"), varied("weight decay"))


def make(name: str, option: str, model: nn.Module) -> Any:
    return FAMILY[name].make(model, **{"lr": 0.05, "damping": 0.5, "T": 2} | OPTIONS[option])


# What makes the host wait: reading a number, and results whose shape depends on numbers.
HOST = (torch.int64, torch.uint8)  # counts, and states of random number generators
READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "allclose"}


class Reads(TorchDispatchMode):
    """Collects reads of numbers, except from tensors that live on the host whatever the device."""

    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self.on_host, self.found = on_host, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS and args[0].data_ptr() not in self.on_host and args[0].dtype not in HOST:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def batch(model: nn.Module, k: int) -> Minibatch:
    x = torch.randn(8, 2, 7, 7, generator=torch.Generator().manual_seed(k))
    return Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3)


def reads(optimizer: Any, model: nn.Module, steps: range) -> list[str]:
    on_host = {s["num_locations"].data_ptr() for s in optimizer.state.values() if "num_locations" in s}
    with Reads(on_host) as mode:
        for k in steps:
            optimizer.step(batch(model, k))
    return mode.found


@pytest.fixture(autouse=True)
def nothing_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU warnings are read at once, and buffers are compared with what they were."""
    monkeypatch.setattr(LateWarning, "_read", lambda self, flag: None)
    for module in (snapshot, gate, averages, validation):
        monkeypatch.setattr(module, "is_on_host", lambda t: False)


@pytest.fixture(autouse=True)
def inverses_are_factored_in_each_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "interval", lambda d: 1)


@each
def test_a_step_reads_nothing_back(name: str, option: str) -> None:
    """Six steps with and without updates, after those that make the initial curvature and look at the network."""
    model = net()
    optimizer = make(name, option, model)
    for k in range(8):
        optimizer.step(batch(model, k))
    assert reads(optimizer, model, range(8, 14)) == []


RATES = [
    pytest.param(0.05, marks=pytest.mark.slow),
    torch.tensor(0.05),
    pytest.param(lambda k: 0.1 / k, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("lr", RATES, ids=["number", "tensor", "function"])
@pytest.mark.parametrize("name", classes())
def test_weights_and_biases_in_two_groups(name: str, lr: Any) -> None:
    """Whether both have one rate is seen without reading it, also after loading."""
    model = net()

    def build() -> Any:
        parts = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        groups = [{"params": part, "weight_decay": 0.1 / i} for i, part in enumerate(parts, start=1)]
        return FAMILY[name].make(model, params=groups, lr=lr, damping=0.5, T=2)

    optimizer = build()
    for k in range(8):
        optimizer.step(batch(model, k))
    assert reads(optimizer, model, range(8, 12)) == []
    other = build()
    other.load_state_dict(optimizer.state_dict())
    for k in range(12, 20):  # it looks for normalizations
        other.step(batch(model, k))
    assert reads(other, model, range(20, 24)) == []


@pytest.mark.parametrize("name", classes())
def test_a_rate_on_the_device_beside_a_schedule(name: str) -> None:
    """Values are checked whenever a schedule sets one; that of a tensor would have to be read."""
    model = net()
    optimizer = FAMILY[name].make(model, lr=torch.tensor(0.05), damping=0.5, T=lambda k: 2)
    for k in range(8):
        optimizer.step(batch(model, k))
    assert reads(optimizer, model, range(8, 12)) == []


@each
def test_numbers_of_the_host_stay_there(name: str, option: str) -> None:
    """Whatever the default device is: nothing that is made in a step is on it for want of a better one."""
    model = net()
    batches = [batch(model, k) for k in range(4)]
    with torch.device("meta"):  # whose tensors have no numbers
        optimizer, other = make(name, option, model), make(name, option, model)
        for minibatch in batches:
            optimizer.step(minibatch)
        optimizer.diagnostics()
        other.load_state_dict(optimizer.state_dict())
        other.step(batches[0])
    assert all(torch.isfinite(p).all() for p in model.parameters())


def hidden_reads(run: Callable[[], object]) -> list[str]:
    """Operations that read a number inside of them, which no dispatch mode sees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    parents = [
        e.cpu_parent.name for e in profile.events() if e.name in ("aten::item", "aten::nonzero") and e.cpu_parent
    ]
    # An asynchronous assertion reads on a CPU only.
    return [name for name in parents if name.startswith("aten::") and name != "aten::_assert_async"]


@each
def test_no_operation_of_a_step_reads_in_secret(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "_host_would_wait", lambda A: True)
    model = net()
    optimizer = make(name, option, model)
    for k in range(8):
        optimizer.step(batch(model, k))
    # With and without an update: an operation does not change its mind, and traces of more steps take long to read.
    assert hidden_reads(lambda: [optimizer.step(batch(model, k)) for k in range(8, 10)]) == []


def test_it_sees_operations_that_read_in_secret() -> None:
    x, A = torch.ones(2), torch.eye(2)
    assert hidden_reads(lambda: x.masked_fill(x > 0, x[0]))
    assert hidden_reads(lambda: x[x > 0])
    assert hidden_reads(lambda: torch.cholesky_inverse(A))
    assert not hidden_reads(lambda: x + A)


def test_the_count_can_fail() -> None:
    """It sees the one wait that there is: initial curvature is checked when it is made."""
    model = net()
    assert reads(make("KBFGS", "plain", model), model, range(2)) != []


def test_it_sees_what_python_does_with_tensors() -> None:
    x: Tensor = torch.ones(2)
    for read in (
        lambda: x[0].item(),
        lambda: bool(x[0] > 0),
        lambda: float(x[0]),
        lambda: x.equal(x),
    ):
        with Reads(set()) as mode:
            read()
        assert mode.found, read
