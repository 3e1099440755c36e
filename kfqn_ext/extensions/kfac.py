"""The two factors of KFAC."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.geometry import LayerPass, Subsampling


class _Counted(Protocol):
    """A result that knows how much it averages."""

    @property
    def num_data(self) -> int: ...

    @property
    def num_locations(self) -> float: ...


def merge_second_moments(reduction: str, old: _Counted, new: _Counted) -> tuple[int, float, tuple[float, float]]:
    """Weights that merge two calls to the second moments of one call on both batches.

    With a mean loss, autograd's gradients are those of a share of the whole batch's loss, so that the gradient of one
    datum's loss is the whole batch's N times them, not the call's own.

    Returns:
        The whole N, the new call's share of it, and the weights of the old and new mean of ∂h_t ∂h_tᵀ.
    """
    total = old.num_data + new.num_data
    share = new.num_data / total
    locations = old.num_locations + share * (new.num_locations - old.num_locations)
    weights = []
    for q in (old, new):
        scale = total / q.num_data if reduction == "mean" else 1.0
        weights.append(scale**2 * q.num_data * q.num_locations / (total * locations))
    return total, share, (weights[0], weights[1])


@dataclass(frozen=True)
class KroneckerFactors:
    """Ω and Γ of N data.

    Attributes:
        Omega: Ω = (1/N) Σ_n Σ_t a_t a_tᵀ, [*B, d_in, d_in].
        Gamma: Γ = (1/N) Σ_n (1/|T|) Σ_t ∂h_t ∂h_tᵀ, [*B, d_out, d_out], with ∂h_t the gradient of one datum's loss.
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
    """

    Omega: Tensor
    Gamma: Tensor
    num_data: int
    num_locations: float


class KFACFactors(LayerExtension[KroneckerFactors]):
    """Ω = E_n[Σ_t a_t a_tᵀ] and Γ = E_n[mean_t ∂h_t ∂h_tᵀ] of each layer, ``algo_1``.

    The result is ``weight.kfac_factors`` and ``ext[module]``. Γ is a Fisher factor if the backward pass is that of a
    loss with targets sampled from the model's predictive distribution, and an empirical Fisher factor with the data's.

    .. note::
        Others scale otherwise. BackPACK's KFAC and KFLR (``weight.kfac``, order [B, A]) have A = Ω without the
        homogeneous coordinate; B = Γ for a linear layer, and for a convolution B = E_n[(Σ_t ∂h_t)(Σ_t ∂h_t)ᵀ], which
        keeps the products of different locations. curvlinops' KFAC with ``kfac_approx="expand"`` has Ω / |T| and |T| Γ.
    """

    def __init__(
        self,
        reduction: str = "mean",
        subsampling: Subsampling = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up the extension; the arguments are those of :class:`LayerExtension`."""
        super().__init__("kfac_factors", reduction, subsampling, accumulate, modules)

    def measure(self, module: nn.Module, layer: LayerPass) -> KroneckerFactors:  # noqa: D102
        mean = layer.grad_scale**2 / (layer.num_data * layer.num_locations)
        Gamma = layer.geometry.gram_outputs(layer.g).mul_(mean)
        return KroneckerFactors(layer.geometry.gram(layer.x), Gamma, layer.num_data, layer.num_locations)

    def merge(self, module: nn.Module, old: KroneckerFactors, layer: LayerPass) -> KroneckerFactors:  # noqa: D102
        new = self.measure(module, layer)
        total, share, weights = merge_second_moments(self.reduction, old, new)
        return KroneckerFactors(
            Omega=old.Omega.lerp_(new.Omega, share),
            Gamma=old.Gamma.mul_(weights[0]).add_(new.Gamma, alpha=weights[1]),
            num_data=total,
            num_locations=old.num_locations + share * (new.num_locations - old.num_locations),
        )
