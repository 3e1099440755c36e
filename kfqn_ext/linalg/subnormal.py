"""Numbers that a CPU multiplies sixty times more slowly."""

import torch
from torch import Tensor

# What is left must survive some factors of decay and products with small numbers before it is flushed again.
_MARGIN = 2.0**40


def flush_(x: Tensor) -> Tensor:
    """Set entries to zero, in place, that are close to the smallest normal number of their dtype (1e-26 in float32).

    Averages over steps decay to subnormal numbers where nothing new comes, as for a unit that is never active, and
    CPUs take up to sixty times as long for products with those.

    Args:
        x: Any tensor in float32, float64 or bfloat16; float16 has no numbers so small.

    Returns:
        The same tensor.
    """
    return torch.hardshrink(x, torch.finfo(x.dtype).tiny * _MARGIN, out=x)  # one operation, which reads x once
