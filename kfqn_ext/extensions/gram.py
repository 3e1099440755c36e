"""The Gram matrix A of a layer's input patches, formed explicitly."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import DATA, over
from kfqn_ext.extensions.shown import Shown
from kfqn_ext.geometry import LayerGeometry, LayerPass


@dataclass(frozen=True, repr=False)
class Gram(Shown):
    """A = (1/N) Σ_n Σ_t a_t a_tᵀ of N data.

    Attributes:
        A: [*B, d_in, d_in].
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    A: Annotated[Tensor, over(DATA, in_place=True)]
    num_data: int
    num_locations: float


class InputGram(LayerExtension[Gram]):
    """A = E_n[Σ_t a_t a_tᵀ] of each layer, ``eq_8``: a mean over data of sums over locations.

    The result is ``weight.input_gram`` and ``ext[module]``. Costs d_in² numbers and N |T| d_in² multiplications;
    :class:`KBFGSQuantities` has products with A for much less. It does not matter what ``reduction`` says.
    """

    savefield = "input_gram"

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> Gram:  # noqa: D102
        return Gram(like.new_zeros(*geometry.blocks, geometry.d_in, geometry.d_in), 1, 1)

    def measure(self, module: nn.Module, layer: LayerPass) -> Gram:  # noqa: D102
        return Gram(layer.geometry.gram(layer.x), layer.num_data, layer.num_locations)

    def add_gradient(self, module: nn.Module, old: Gram, layer: LayerPass) -> Gram:  # noqa: D102
        return old
