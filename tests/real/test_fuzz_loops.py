"""Seeds of random training loops: twenty-five of them, and all 500 on request."""

import pytest

from tests.real import fuzz_loops


@pytest.mark.parametrize("seed", range(25))
def test_seed(seed: int) -> None:
    fuzz_loops.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_loops() -> None:
    assert fuzz_loops.main(500, 0) == 0
