"""H_A and H_G as one part of the package shows them to another: matrices that are multiplied with, formed or not."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Inverses", "SymmetricOperator"]


@dataclass(frozen=True, repr=False)
class SymmetricOperator:
    """A symmetric matrix H, or one for each channel group, that need not be formed: use ``H @ M``.

    Attributes:
        shape: [*B, d, d].
        dtype: Of the result.
        device: Of the result.
        times: M ↦ H M, [*B, d, k] → the same.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    times: Callable[[Tensor], Tensor]

    def __matmul__(self, M: Tensor) -> Tensor:
        """H M: [*B, d] or [*B, d, k] → the same.

        Raises:
            ValueError: If the shape of ``M`` does not fit.
        """
        if M.shape == self.shape[:-1]:
            return (self @ M.unsqueeze(-1)).squeeze(-1)
        if M.shape[:-1] != self.shape[:-1]:
            d = ", ".join(map(str, self.shape[:-1]))
            raise ValueError(f"H has shape {list(self.shape)}; it multiplies [{d}] or [{d}, k], not {list(M.shape)}.")
        return self.times(M.to(self.device, self.dtype)).to(self.dtype)

    def __repr__(self) -> str:
        """Describe it by its shape."""
        return f"SymmetricOperator({list(self.shape)})"

    def dense(self) -> Tensor:
        """H, formed: [*B, d, d]."""
        return self @ torch.eye(self.shape[-1], dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass(frozen=True, repr=False)
class Inverses:
    """What an optimizer holds for a layer: its direction is H_G M H_A, ``eq_18``.

    Attributes:
        H_A: Approximate inverse of A + λ_A I, [*B, d_in, d_in].
        H_G: Approximate inverse of G + λ_G I, [*B, d_out, d_out].
        dampings: (λ_A, λ_G), a number or [*B] each; None where the optimizer names none.
        fisher: Whether H_G inverts the Fisher factor Γ in place of G, as KFAC's does.
    """

    H_A: Tensor | SymmetricOperator
    H_G: Tensor | SymmetricOperator
    dampings: tuple[float | Tensor, float | Tensor] | None = None
    fisher: bool = False

    def __repr__(self) -> str:
        """Describe both by their shapes."""
        return f"Inverses(H_A={list(self.H_A.shape)}, H_G={list(self.H_G.shape)}, fisher={self.fisher})"

    def dense(self) -> tuple[Tensor, Tensor]:
        """H_A and H_G, formed."""
        H_A, H_G = (H.detach() if isinstance(H, Tensor) else H.dense() for H in (self.H_A, self.H_G))
        return H_A, H_G

    @property
    def damping(self) -> float | None:
        """λ = λ_A λ_G, its mean over channel groups; None where the optimizer names none."""
        if self.dampings is None:
            return None
        product = self.dampings[0] * self.dampings[1]
        return float(product.mean()) if isinstance(product, Tensor) else product
