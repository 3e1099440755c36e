"""Numbers about matrices that are never formed: from products with random probes, with standard errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from kfqn_ext.curvature.factors import signs
from kfqn_ext.curvature.lazy import need
from kfqn_ext.curvature.products import Product


@dataclass(frozen=True)
class Estimate:
    """A number known up to chance.

    Attributes:
        value: The estimate.
        standard_error: Its standard error.
        probes: How many probes it rests on.
    """

    value: float
    standard_error: float
    probes: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's confidence interval.

        Args:
            level: Share of repetitions in which it covers the exact value, asymptotically in the number of probes.

        Returns:
            Its ends.

        Raises:
            ModuleNotFoundError: If scipy is not installed.
        """
        t = float(need("scipy.stats", "Estimate.interval()").t.ppf((1 + level) / 2, self.probes - 1))
        return self.value - t * self.standard_error, self.value + t * self.standard_error

    def __str__(self) -> str:
        """Value ± standard error."""
        return f"{self.value:.4g} ± {self.standard_error:.1g}"


def jackknife(
    samples: Tensor, function: Callable[[Tensor], Tensor], lowest: float = -inf, highest: float = inf
) -> Estimate:
    """Estimate a smooth function of means, and its standard error by leaving out one sample at a time.

    The value is corrected for the bias that a nonlinear function of means has, to first order. With few samples the
    correction overshoots: the value is held to what is possible.

    Args:
        samples: One row a probe, [m, k].
        function: Maps means [..., k] to numbers [...].
        lowest: Least possible value.
        highest: Greatest possible value.

    Returns:
        The estimate.

    Raises:
        ValueError: If there are fewer than two samples.
    """
    m = samples.shape[0]
    if m < 2:
        raise ValueError(f"A standard error needs at least two probes, not {m}.")
    samples = samples.double()
    mean = samples.mean(0)
    left_out = function((m * mean - samples) / (m - 1))
    error = ((m - 1) / m * (left_out - left_out.mean()).square().sum()).sqrt()
    corrected = m * function(mean) - (m - 1) * left_out.mean()
    value = torch.where(corrected.isfinite(), corrected, function(mean))
    return Estimate(float(value.clamp(lowest, highest)), float(error), m)


@dataclass(frozen=True)
class Probed:
    """Products of several symmetric matrices with the same random probes.

    Attributes:
        inner: ⟨M_i z, M_j z⟩ for each probe: [m, matrices, matrices]. Its mean over probes estimates ⟨M_i, M_j⟩_F.
    """

    inner: Tensor

    @classmethod
    def of(
        cls, products: Sequence[Product], like: Tensor, probes: int, seed: int = 0, rounds: Iterable[int] | None = None
    ) -> "Probed":
        """Multiply every matrix with every probe: ``probes`` products a matrix.

        Args:
            products: The matrices.
            like: A tensor of the shape, dtype and device that they multiply, [*B, d_out, d_in].
            probes: How many probes m.
            seed: Seed of a generator of its own; the global one is not used.
            rounds: ``range(probes)`` in a progress bar, where one is wanted.

        Returns:
            The inner products.
        """
        generator = torch.Generator(like.device).manual_seed(seed)
        inner = torch.empty(probes, len(products), len(products), dtype=torch.float64)
        for k in range(probes) if rounds is None else rounds:
            z = signs(like, generator)
            Mz = torch.stack([product(z).flatten() for product in products]).double()
            inner[k] = (Mz @ Mz.T).cpu()
        return cls(inner)

    def norm(self, i: int) -> Estimate:
        """‖M_i‖_F, at least 0."""
        return jackknife(self.inner[:, i, i].unsqueeze(-1), lambda mean: mean[..., 0].sqrt(), lowest=0.0)

    def inner_product(self, i: int, j: int) -> Estimate:
        """⟨M_i, M_j⟩_F, Hutchinson's estimate of tr(M_i M_j)."""
        return jackknife(self.inner[:, i, j].unsqueeze(-1), lambda mean: mean[..., 0])

    def relative_error(self, i: int, exact: int = 0) -> Estimate:
        """‖M_i - B‖_F / ‖B‖_F. Both norms see the same probes, so that their errors cancel in part."""
        return self.ratio({i: 1.0, exact: -1.0} if i != exact else {}, {exact: 1.0})

    def ratio(self, top: Mapping[int, float], bottom: Mapping[int, float]) -> Estimate:
        """‖Σ c_i M_i‖_F / ‖Σ d_i M_i‖_F for two combinations, coefficients by position; at least 0, 0 / 0 is 0."""
        squares = torch.stack((self._square(top), self._square(bottom)), -1)
        return jackknife(
            squares, lambda mean: torch.where(mean[..., 0] == 0, 0.0, mean[..., 0] / mean[..., 1]).sqrt(), lowest=0.0
        )

    def _square(self, combination: Mapping[int, float]) -> Tensor:
        c = torch.zeros(self.inner.shape[-1], dtype=torch.float64)
        for i, value in combination.items():
            c[i] = value
        return torch.einsum("i,mij,j->m", c, self.inner, c).clamp(min=0)

    def cosine(self, i: int, exact: int = 0) -> Estimate:
        """⟨M_i, B⟩_F / (‖M_i‖_F ‖B‖_F), within ±1; NaN with a zero matrix."""
        parts = torch.stack((self.inner[:, i, exact], self.inner[:, i, i], self.inner[:, exact, exact]), -1)
        return jackknife(parts, lambda mean: mean[..., 0] / (mean[..., 1] * mean[..., 2]).sqrt(), -1.0, 1.0)
