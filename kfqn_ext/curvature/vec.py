"""The paper's order of a layer's parameters, and torch's."""

from collections.abc import Sequence

from torch import Tensor, cat

from kfqn_ext.geometry import LayerGeometry

ORDERS = ("paper", "torch")


def vec(W: Tensor) -> Tensor:
    """Stack the columns of W, [*B, d_out, d_in] → [*B, d_in · d_out], as the paper does."""
    return W.mT.flatten(-2)


def unvec(v: Tensor, d_out: int) -> Tensor:
    """Undo :func:`vec`: [*B, d_in · d_out] → [*B, d_out, d_in]."""
    return v.reshape(*v.shape[:-1], -1, d_out).mT


def torch_vec(geometry: LayerGeometry, W: Tensor, weight_shape: Sequence[int]) -> Tensor:
    """Parameters as torch holds them: ``weight.flatten()``, then ``bias``. [*B, d_out, d_in] → [all]."""
    weight, bias = geometry.columns(W.contiguous(), weight_shape)
    return weight.flatten() if bias is None else cat([weight.flatten(), bias])


def check_order(order: str) -> None:
    """Refuse an unknown order.

    Raises:
        ValueError: If ``order`` is neither "paper" nor "torch".
    """
    if order not in ORDERS:
        raise ValueError(
            f"order={order!r}: choose 'paper', the columns of W = [weight, bias] stacked, or 'torch', "
            "weight.flatten() and then bias."
        )
