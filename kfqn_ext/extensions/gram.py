"""The Gram matrix A of a layer's input patches, formed explicitly."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.geometry import LayerPass, Subsampling


@dataclass(frozen=True)
class Gram:
    """A = (1/N) Σ_n Σ_t a_t a_tᵀ of N data.

    Attributes:
        A: [*B, d_in, d_in].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    A: Tensor
    num_data: int
    num_locations: float


class InputGram(LayerExtension[Gram]):
    """A = E_n[Σ_t a_t a_tᵀ] of each layer, ``eq_8``: a mean over data of sums over locations.

    The result is ``weight.input_gram`` and ``ext[module]``. Costs d_in² numbers and N |T| d_in² multiplications;
    :class:`KBFGSQuantities` has products with A for much less.
    """

    def __init__(
        self,
        subsampling: Subsampling = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up the extension; the arguments are those of :class:`LayerExtension`."""
        super().__init__("input_gram", subsampling=subsampling, accumulate=accumulate, modules=modules)

    def measure(self, module: nn.Module, layer: LayerPass) -> Gram:  # noqa: D102
        return Gram(layer.geometry.gram(layer.x), layer.num_data, layer.num_locations)

    def add_gradient(self, module: nn.Module, old: Gram, layer: LayerPass) -> Gram:  # noqa: D102
        return old

    def merge(self, module: nn.Module, old: Gram, layer: LayerPass) -> Gram:  # noqa: D102
        total = old.num_data + layer.num_data
        share = layer.num_data / total
        # In place: A is the large matrix here, and the old result is not to be used any more.
        A = old.A.lerp_(layer.geometry.gram(layer.x), share)
        return Gram(A, total, old.num_locations + share * (layer.num_locations - old.num_locations))
