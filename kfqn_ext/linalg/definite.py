"""Find a symmetric matrix that rounding has made indefinite, by factorization, and make it definite again.

All is counted in units of H's diagonal, D, in which rounding is relative: C = D^-½ H D^-½ has a diagonal of ones. What
fails is known to the device alone, and nothing here asks it.
"""

import torch
from torch import Tensor

# A factorization succeeds for C with eigenvalues down to -0.4 √d ε, as measured up to d = 1001: what succeeds by this
# margin is definite. The bound for the worst case is d² ε/2, by which hardly any C of correlated inputs would be.
_MARGIN = 2.0
# What rounding leaves below zero is a few ε. So much repaired each of 1,000 H that drift had spoiled; 64 left five.
_LIFT = 1000.0


def make_definite_(H: Tensor) -> Tensor:
    """Make H positive definite in place, and leave it bit for bit as it is where it is so beyond rounding.

    H is factored with its diagonal made smaller by 2√d ε of itself. Where that fails, the diagonal is made larger by
    1000 ε of itself. Where that does not help, rows and columns from the one at which the second factorization fails
    keep their diagonal alone: what comes before has just been factored. C has no eigenvalue below √d ε afterwards.
    This takes 2d³/3 operations, and memory for one factor at a time.

    Args:
        H: Symmetric and finite, [*B, d, d]. Overwritten where it is not definite.

    Returns:
        Which were not, bool [*B].
    """
    failed = _first_failure(H) > 0
    _lift_(H, failed)
    _cut_(H, _first_failure(H))
    return failed


def _first_failure(H: Tensor) -> Tensor:
    """Order of the first leading minor that is not definite by a margin, int [*B]; 0 where all are."""
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    diagonal.mul_(1.0 - _MARGIN * H.shape[-1] ** 0.5 * torch.finfo(H.dtype).eps)
    info: Tensor = torch.linalg.cholesky_ex(H, check_errors=False).info
    diagonal.copy_(kept)  # and not a quotient, which would be rounded
    return info


def _lift_(H: Tensor, failed: Tensor) -> None:
    """Enlarge the diagonal where a matrix has failed; what is not positive on it becomes as large as the rest is."""
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    precision = torch.finfo(H.dtype)
    mean = diagonal.abs().mean(-1, keepdim=True).clamp(min=precision.tiny)
    lifted = torch.where(diagonal > 0, diagonal, mean) * (1.0 + _LIFT * precision.eps)
    diagonal.copy_(torch.where(failed.unsqueeze(-1), lifted, diagonal))


def _cut_(H: Tensor, info: Tensor) -> None:
    """Clear rows and columns beside the diagonal from the first failure on, where there is one."""
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    order = torch.arange(1, H.shape[-1] + 1, device=H.device)
    definite = (order < info.unsqueeze(-1)) | (info == 0).unsqueeze(-1)
    H.mul_(definite.unsqueeze(-1)).mul_(definite.unsqueeze(-2))
    diagonal.copy_(kept)
