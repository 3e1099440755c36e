"""λ_A λ_G = λ, however the damping is shared."""

import pytest
import torch

from kfqn_ext.linalg.splits import Balance, equal, spatial, trace

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
