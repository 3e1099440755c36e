"""What one layer saw in one forward-backward pass: all that a quantity may be computed from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_divided
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.geometry.base import LayerGeometry

# Which data of a batch: indices, a fraction of the batch (its first data, rounded up), or None for all.
Subsampling = Sequence[int] | float | None


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
        weight: The layer's weight at the time of the pass, not a copy.
        bias: The layer's bias, or None.
        eps: Relative rounding error of the gradient as it arrived.
    """

    geometry: LayerGeometry
    x: Tensor
    g: Tensor
    num_data: int
    num_locations: int
    grad_scale: float
    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(
        cls,
        geometry: LayerGeometry,
        module: nn.Module,
        x: Tensor,
        g: Tensor,
        reduction: str,
        subsampling: Subsampling = None,
        loss_scale: float = 1.0,
    ) -> "LayerPass":
        """Cast to the working dtype (float32 at least), batch, and subsample.

        Args:
            geometry: The module's geometry.
            module: The layer; only its parameters' values are used.
            x: Its input, as it received it.
            g: Gradient by its output.
            reduction: "mean" or "sum": what the loss does over data.
            subsampling: Which data to use: indices, a fraction of the batch, or None for all.
            loss_scale: What the loss was multiplied with to keep its gradients in range.

        Returns:
            The pass.

        Raises:
            UnsupportedLayerError: If the input is sparse, or this process has a part of input or weight alone.
        """
        weight: Tensor = cast(Any, module.weight).detach()
        bias: Tensor | None = getattr(module, "bias", None)
        if is_divided(weight) or is_divided(x):
            raise UnsupportedLayerError(
                f"The weight or the input of {module} is divided among processes while the layer runs, as tensor "
                "parallelism does: each has a part of h = W a. Use DistributedDataParallel or fully_shard, under which "
                "layers run whole."
            )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if x.layout is not torch.strided:
            raise UnsupportedLayerError(f"The input of {module} is sparse ({x.layout}): give it layer(x.to_dense()).")
        x, g = geometry.as_batch(x.detach()), geometry.as_batch(g.detach())
        total = x.shape[0]
        if isinstance(subsampling, float):
            part = fraction_size(total, subsampling)
            x, g = x[:part], g[:part]
        elif subsampling is not None:
            x, g = x[list(subsampling)], g[list(subsampling)]
        return cls(
            geometry=geometry,
            x=x.to(dtype),
            g=g.to(dtype),
            num_data=x.shape[0],
            num_locations=geometry.num_locations(g),
            grad_scale=(total if reduction == "mean" else 1.0) / loss_scale,
            weight=weight.to(dtype),
            bias=None if bias is None else bias.detach().to(dtype),
            eps=torch.finfo(g.dtype).eps,
        )


def joined(calls: Sequence[LayerPass], reduction: str) -> list[LayerPass]:
    """Calls of one layer as one batch where all have the same shapes, else as they are.

    Args:
        calls: Calls whose losses add up to the whole's.
        reduction: "mean" or "sum": what the whole's loss does over its data.
    """
    kinds = {(call.x.shape, call.g.shape, call.grad_scale, call.eps) for call in calls}
    if len(calls) < 2 or len(kinds) > 1:
        return list(calls)
    first, number = calls[0], len(calls)
    scale = first.grad_scale * (number if reduction == "mean" else 1)
    x, g = torch.cat([call.x for call in calls]), torch.cat([call.g for call in calls])
    return [replace(first, x=x, g=g, num_data=number * first.num_data, grad_scale=scale)]


def refuse_nested(module: nn.Module) -> None:
    """Refuse to measure a layer on a nested tensor.

    Args:
        module: The layer.

    Raises:
        UnsupportedLayerError: Always.
    """
    raise UnsupportedLayerError(
        f"The input of {module} is a nested tensor, whose data differ in their number of locations: it can't be "
        "measured. Give the layer a padded one, layer(x.to_padded_tensor(0.0)), or leave its parameters to a "
        "torch.optim optimizer."
    )


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input that a layer was called with: its first argument, by position or by whatever name.

    Args:
        args: The arguments by position.
        kwargs: The arguments by name.
    """
    x: Tensor = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
    return x


def fraction_size(total: int, fraction: float) -> int:
    """How many data a fraction of a batch has, rounded up.

    Args:
        total: How many data the batch has.
        fraction: In (0, 1].
    """
    return math.ceil(round(total * fraction, 9))  # 100 · 0.07 is 7.000000000000001


def checked_subsampling(subsampling: Subsampling) -> list[int] | float | None:
    """A subsampling in one of the forms that :meth:`LayerPass.of` takes.

    Args:
        subsampling: Indices of data, a fraction of a batch, or None for all of it.

    Raises:
        ValueError: If it is none of these.
    """
    if subsampling is None or (isinstance(subsampling, float) and 0.0 < subsampling <= 1.0):
        return subsampling
    if isinstance(subsampling, Sequence) and subsampling and all(type(i) is int for i in subsampling):
        return list(subsampling)
    raise ValueError(
        f"subsampling={subsampling!r}: give a fraction of the batch as a float in (0.0, 1.0], or a list of indices."
    )
