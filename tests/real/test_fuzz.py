"""Seeds of random networks: a few fast ones, those that once found a fault, and all 2,000 on request."""

import pytest

from tests.real import fuzz

ONCE_FAILED = [258, 594, 1552]  # layers used through F.linear alone; a parametrized layer without a bias


@pytest.mark.parametrize("seed", [*range(40), *ONCE_FAILED])
def test_seed(seed: int) -> None:
    fuzz.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_networks() -> None:
    assert fuzz.main(2000, 0) == 0
