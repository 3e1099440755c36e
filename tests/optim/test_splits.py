"""λ_A λ_G = λ, however the damping is shared; or ε in units of each factor's mean eigenvalue."""

import functools

import pytest
import torch

from kfqn_ext.linalg.splits import Balance, Given, equal, is_relative, relative, spatial, trace

F64 = torch.float64


@pytest.mark.parametrize("split", [spatial, equal, trace])
def test_the_product_is_the_damping(split: object) -> None:
    balance = Balance(9.0, torch.tensor([4.0, 1.0], dtype=F64), torch.tensor([0.25, 8.0], dtype=F64))
    damping_A, damping_G = split(0.3, balance)  # type: ignore[operator]
    assert torch.allclose(torch.as_tensor(damping_A * damping_G, dtype=F64), torch.tensor(0.3, dtype=F64))


def test_traces_share_it_by_the_mean_eigenvalues() -> None:
    damping_A, damping_G = trace(4.0, Balance(1.0, torch.tensor(9.0, dtype=F64), torch.tensor(0.25, dtype=F64)))
    assert float(damping_A) == pytest.approx(12.0) and float(damping_G) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("trace_A", "trace_G", "pi"), [(1.0, 0.0, 1e3), (0.0, 1.0, 1e-3), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_factor_that_is_zero_says_nothing_about_the_other(
    trace_A: float, trace_G: float, pi: float, dtype: torch.dtype
) -> None:
    """π is held between 10⁻³ and 10³, so that neither damping vanishes beside the factor that is there."""
    balance = Balance(1.0, torch.tensor([trace_A], dtype=dtype), torch.tensor([trace_G], dtype=dtype))
    damping_A, damping_G = trace(4.0, balance)
    assert float(damping_A) == pytest.approx(2 * pi, rel=1e-5) and float(damping_G) == pytest.approx(2 / pi, rel=1e-5)


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_a_relative_damping_counts_in_mean_eigenvalues(unit: float) -> None:
    """So that (A + λ_A I)⁻¹ of a larger unit is the same matrix in that unit."""
    A, G = torch.diag(torch.tensor([1.0, 2.0, 6.0], dtype=F64)), torch.diag(torch.tensor([0.5, 1.5], dtype=F64))
    balance = Balance(9.0, (unit * A).trace() / 3, (unit**2 * G).trace() / 2)
    damping_A, damping_G = relative(0.3, balance)
    for factor, damping, size, mean in ((A, damping_A, unit, 3.0), (G, damping_G, unit**2, 1.0)):
        assert float(damping) == pytest.approx(0.3 * mean * size, rel=1e-12)
        eye = torch.eye(len(factor), dtype=F64)
        inverse = torch.linalg.inv(size * factor + damping * eye)
        torch.testing.assert_close(size * inverse, torch.linalg.inv(factor + 0.3 * mean * eye), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_relative_damping_of_nothing_can_be_inverted(dtype: torch.dtype) -> None:
    """A layer that sees only zeros has no mean eigenvalue: each of its inverses stays finite."""
    zero = torch.zeros(2, dtype=dtype)
    damping_A, damping_G = relative(0.3, Balance(1.0, zero, zero))
    assert (1 / damping_A).isfinite().all() and (1 / damping_G).isfinite().all()


def test_a_wrapped_relative_split_is_one() -> None:
    @functools.wraps(relative)
    def halved(damping: float, balance: Balance) -> object:
        return relative(0.5 * damping, balance)

    assert is_relative(relative) and is_relative(halved)
    assert not any(is_relative(split) for split in (spatial, equal, trace, Given(1.0, 1.0)))
