"""What one layer saw in one forward-backward pass: all that a quantity may be computed from."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kfqn_ext.geometry.base import LayerGeometry


@dataclass(frozen=True)
class LayerPass:
    """Input and output gradient of one call of a layer.

    Attributes:
        geometry: The layer.
        x: Its input, batched, in the layer's working dtype.
        g: Gradient of the loss with respect to its output, batched, in the working dtype.
        num_data: N.
        num_locations: |T|.
        grad_scale: What turns ``g`` into gradients of a single datum's loss: N where the loss is a mean over data,
            1 where it is a sum, over the loss's scale.
        W: The layer's matrix at the time of the pass, [*B, d_out, d_in].
        eps: Relative rounding error of the gradient as it arrived.
    """

    geometry: LayerGeometry
    x: Tensor
    g: Tensor
    num_data: int
    num_locations: int
    grad_scale: float
    W: Tensor
    eps: float

    @classmethod
    def of(
        cls,
        geometry: LayerGeometry,
        module: nn.Module,
        x: Tensor,
        g: Tensor,
        reduction: str,
        subsampling: list[int] | None = None,
        loss_scale: float = 1.0,
    ) -> "LayerPass":
        """Cast to the working dtype (float32 at least), batch, and subsample.

        Args:
            geometry: The module's geometry.
            module: The layer; only its parameters' values are used.
            x: Its input, as it received it.
            g: Gradient by its output.
            reduction: "mean" or "sum": what the loss does over data.
            subsampling: Indices of the data to use; all where None.
            loss_scale: What the loss was multiplied with to keep its gradients in range.

        Returns:
            The pass.
        """
        weight: Tensor = cast(Any, module.weight).detach()
        bias: Tensor | None = getattr(module, "bias", None)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        x, g = geometry.as_batch(x.detach()), geometry.as_batch(g.detach())
        total = x.shape[0]
        if subsampling is not None:
            x, g = x[subsampling], g[subsampling]
        return cls(
            geometry=geometry,
            x=x.to(dtype),
            g=g.to(dtype),
            num_data=x.shape[0],
            num_locations=geometry.num_locations(g),
            grad_scale=(total if reduction == "mean" else 1.0) / loss_scale,
            W=geometry.matrix(weight.to(dtype), None if bias is None else bias.detach()),
            eps=torch.finfo(g.dtype).eps,
        )
