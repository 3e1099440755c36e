"""The two factors of KFAC."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.pooling import DATA, SQUARES, over
from kfqn_ext.extensions.shown import Shown
from kfqn_ext.extensions.traces import Traces
from kfqn_ext.geometry import LayerGeometry, LayerPass


@dataclass(frozen=True, repr=False)
class KroneckerFactors(Shown):
    """Ω and Γ of N data.

    Attributes:
        Omega: Ω = (1/N) Σ_n Σ_t a_t a_tᵀ, [*B, d_in, d_in].
        Gamma: Γ = (1/N) Σ_n (1/|T|) Σ_t ∂h_t ∂h_tᵀ, [*B, d_out, d_out], with ∂h_t the gradient of one datum's loss.
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    Omega: Annotated[Tensor, over(DATA, in_place=True)]
    Gamma: Annotated[Tensor, over(SQUARES, in_place=True)]
    num_data: int
    num_locations: float

    def traces(self) -> Traces:
        """Their mean eigenvalues."""
        A, G = (M.diagonal(dim1=-2, dim2=-1).mean(-1) for M in (self.Omega, self.Gamma))
        return Traces(A=A, G=G, num_data=self.num_data, num_locations=self.num_locations)


class KFACFactors(LayerExtension[KroneckerFactors]):
    """Ω = E_n[Σ_t a_t a_tᵀ] and Γ = E_n[mean_t ∂h_t ∂h_tᵀ] of each layer, ``algo_1``.

    The result is ``weight.kfac_factors`` and ``ext[module]``. Γ is a Fisher factor if the backward pass is that of a
    loss with targets sampled from the model's predictive distribution, and an empirical Fisher factor with the data's.

    .. note::
        Others scale otherwise. BackPACK's KFAC and KFLR (``weight.kfac``, order [B, A]) have A = Ω without the
        homogeneous coordinate; B = Γ for a linear layer, and for a convolution B = E_n[(Σ_t ∂h_t)(Σ_t ∂h_t)ᵀ], which
        keeps the products of different locations. curvlinops' KFAC with ``kfac_approx="expand"`` has Ω / |T| and |T| Γ.
    """

    savefield = "kfac_factors"

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> KroneckerFactors:  # noqa: D102
        Omega, Gamma = (like.new_zeros(*geometry.blocks, d, d) for d in (geometry.d_in, geometry.d_out))
        return KroneckerFactors(Omega, Gamma, 1, 1)

    def measure(self, module: nn.Module, layer: LayerPass) -> KroneckerFactors:  # noqa: D102
        mean = layer.grad_scale**2 / (layer.num_data * layer.num_locations)
        Gamma = layer.geometry.gram_outputs(layer.g).mul_(mean)
        return KroneckerFactors(layer.geometry.gram(layer.x), Gamma, layer.num_data, layer.num_locations)
