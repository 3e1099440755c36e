"""What every public function of this package runs in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfqn_ext.linalg import full_precision


@contextmanager
def measuring() -> Iterator[None]:
    """Make second derivatives exist, whatever mode the caller is in; also a decorator.

    Without a graph, as in ``torch.no_grad()`` and ``torch.inference_mode()``, all curvature would be zero. Of torch's
    attention kernels only the one made of plain operations can be differentiated twice.
    """
    with full_precision(), torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield
