"""What holds for every test: a fixed seed, few threads, and GPU tests only where there is a GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kfqn_ext.optim.preconditioner import rounded

# The tensors are small: more threads cost more than they bring, sums vary with their number, and threads of workers
# that run side by side wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        raise pytest.UsageError(f"Names that differ from worker to worker: {addresses[:3]}. Give these tests ids.")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Make each test independent of which tests ran before it."""
    torch.manual_seed(0)
    yield
    torch.set_flush_denormal(False)  # as a program sets that ran in this process


@pytest.fixture(autouse=True)
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions in bfloat16 are tested on processors too where they would be taken in float32, as they are slow."""
    monkeypatch.setattr(rounded, "multiplies_bfloat16", lambda device: True)


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    """Names without addresses in memory: workers that run side by side must collect the same tests."""
    if isinstance(val, partial):
        options = ",".join(f"{key}={value}" for key, value in val.keywords.items() if not isinstance(value, Tensor))
        return f"{getattr(val.func, '__name__', 'partial')}({options})"
    return getattr(val, "__name__", None) if callable(val) else None
