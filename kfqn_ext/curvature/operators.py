"""Approximations of a layer's block as products with matrices V, [*B, d_out, d_in]: nothing of its size is formed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext.curvature.krylov import extreme_eigenvalues, solve
from kfqn_ext.curvature.products import Product
from kfqn_ext.linalg import kronecker_matmul


class Operator:
    """A symmetric matrix that is known by its products; Krylov methods do the rest."""

    def __call__(self, V: Tensor) -> Tensor:
        """Multiply: [*B, d_out, d_in] → [*B, d_out, d_in]."""
        raise NotImplementedError

    def solve(self, damping: float, gradient: Tensor) -> tuple[Tensor, bool]:
        """(M + λI)⁻¹ g, and whether it is solved to the method's accuracy."""
        return solve(self, damping, gradient)

    def extremes(self, like: Tensor) -> Tensor:
        """The eigenvalues at both ends of the spectrum, ascending; all of them where they come for nothing."""
        return extreme_eigenvalues(self, like)


@dataclass(frozen=True)
class Multiplication(Operator):
    """A matrix given by a function."""

    product: Product

    def __call__(self, V: Tensor) -> Tensor:  # noqa: D102
        return self.product(V)


@dataclass(frozen=True)
class IdentityOperator(Operator):
    """A multiple of the identity: what gradient descent takes the curvature for."""

    scale: float

    def __call__(self, V: Tensor) -> Tensor:  # noqa: D102
        return self.scale * V

    def solve(self, damping: float, gradient: Tensor) -> tuple[Tensor, bool]:  # noqa: D102
        return gradient / (self.scale + damping), True

    def extremes(self, like: Tensor) -> Tensor:  # noqa: D102
        return torch.full((like.numel(),), self.scale, dtype=torch.float64)


class KroneckerOperator(Operator):
    """A ⊗ G: V ↦ G V A, with a solve and a spectrum from the factors' eigenvalues."""

    def __init__(self, A: Tensor, G: Tensor) -> None:
        """Take symmetric factors A [*B, d_in, d_in] and G [*B, d_out, d_out]."""
        self.A, self.G = A, G
        self._eigen: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, V: Tensor) -> Tensor:  # noqa: D102
        return kronecker_matmul(self.G, V, self.A)

    def _decomposition(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._eigen is None:
            (a, U), (g, Q) = torch.linalg.eigh(self.A.double()), torch.linalg.eigh(self.G.double())
            self._eigen = (g.unsqueeze(-1) * a.unsqueeze(-2), Q, U)
        return self._eigen

    def solve(self, damping: float, gradient: Tensor) -> tuple[Tensor, bool]:  # noqa: D102
        values, Q, U = self._decomposition()
        return (Q @ ((Q.mT @ gradient.double() @ U) / (values + damping)) @ U.mT).to(gradient), True

    def extremes(self, like: Tensor) -> Tensor:  # noqa: D102
        return self._decomposition()[0].flatten().sort().values


@dataclass(frozen=True)
class RootsOperator(Operator):
    """Σ_m σ_m vec(V_m) vec(V_m)ᵀ, as the Gauss-Newton matrix is given.

    Attributes:
        roots: The V_m, [M, *B, d_out, d_in]; where the layer has channel groups, blocks do not mix.
        sigma: Their signs, [M].
    """

    roots: Tensor
    sigma: Tensor

    def __call__(self, V: Tensor) -> Tensor:  # noqa: D102
        along = torch.einsum("m...oj,...oj->m...", self.roots, V)
        return torch.einsum("m...,m,m...oj->...oj", along, self.sigma, self.roots)
