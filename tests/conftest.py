"""What holds for every test: a fixed seed, few threads, and GPU tests only where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch

# The tensors are small: more threads cost more than they bring, and sums vary with their number.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
