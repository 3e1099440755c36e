"""Products with the Gram matrix A of a layer's input patches, which is not kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kfqn_ext.extensions.shown import described
from kfqn_ext.geometry import LayerGeometry
from kfqn_ext.linalg import full_precision


@dataclass(frozen=True, repr=False)
class GramOperator:
    """A = (1/N) Σ_n Σ_t a_t a_tᵀ of the batches that a layer saw, not kept: use ``A @ s``.

    Attributes:
        geometry: The layer.
        inputs: Its inputs, one tensor a call.
    """

    geometry: LayerGeometry
    inputs: tuple[Tensor, ...]

    @classmethod
    def joined(cls, parts: Sequence["GramOperator"]) -> "GramOperator":
        """A of the batches of all parts together, of one layer."""
        return cls(parts[0].geometry, tuple(x for part in parts for x in part.inputs))

    def __repr__(self) -> str:
        """Describe the shapes of A and of what it is made of."""
        return f"GramOperator({list(self.shape)} of {', '.join(map(described, self.inputs))})"

    @property
    def shape(self) -> tuple[int, ...]:
        """[*B, d_in, d_in]."""
        return (*self.geometry.blocks, self.geometry.d_in, self.geometry.d_in)

    def __matmul__(self, s: Tensor) -> Tensor:
        """Multiply A with a vector or a matrix, ``eq_14``.

        Args:
            s: [*B, d_in] or [*B, d_in, k].

        Returns:
            A s, shaped like ``s``.

        Raises:
            ValueError: If the shape of ``s`` does not fit.
        """
        with full_precision():
            return self.times(s)

    def times(self, s: Tensor) -> Tensor:
        """``A @ s`` in the precision that is set: [*B, d_in] or [*B, d_in, k] → the same; ValueError for others."""
        blocks, d = self.geometry.blocks, self.geometry.d_in
        if s.shape == (*blocks, d):
            return self.times(s.unsqueeze(-1)).squeeze(-1)
        if s.shape[:-1] != (*blocks, d):
            raise ValueError(
                f"A has shape {list(self.shape)}; it multiplies [{', '.join(map(str, (*blocks, d)))}] or "
                f"[{', '.join(map(str, (*blocks, d)))}, k], not {list(s.shape)}."
            )
        s = s.to(self.inputs[0].dtype)
        if len(self.inputs) == 1:
            return self.geometry.gram_product(self.inputs[0], s)
        total = sum(x.shape[0] for x in self.inputs)
        products = [self.geometry.gram_product(x, s) * (x.shape[0] / total) for x in self.inputs]
        return sum(products[1:], start=products[0])
