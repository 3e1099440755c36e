"""Eigenvalues, Newton's direction and the nearest Kronecker product by Krylov methods: scipy's, on products."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.curvature.lazy import need
from kfqn_ext.curvature.products import Product


def _operator(product: Product, like: Tensor) -> Any:
    """A product as a ``scipy.sparse.linalg.LinearOperator`` on flat vectors, in float64 towards scipy."""
    linalg, n = need("scipy.sparse.linalg", "A Krylov method"), like.numel()

    def matvec(v: Any) -> Any:
        V = torch.as_tensor(v, dtype=torch.float64).reshape(like.shape).to(like)
        return product(V).flatten().double().cpu().numpy()

    return linalg.LinearOperator((n, n), matvec=matvec, dtype=float)


def _start(n: int) -> Any:
    """A starting vector that is the same in every run."""
    return need("numpy", "A Krylov method").random.default_rng(0).standard_normal(n)


def extreme_eigenvalues(product: Product, like: Tensor, count: int = 3, tol: float = 1e-2) -> Tensor:
    """Eigenvalues at both ends of the spectrum, by Lanczos (``scipy.sparse.linalg.eigsh``).

    Each end is sought as the upper end of c I ± M with c the spectral norm: eigenvalues near zero, of which a
    curvature matrix has many, have no relative accuracy to converge to.

    Args:
        product: The matrix M.
        like: A tensor of the shape, dtype and device that it multiplies.
        count: How many at each end.
        tol: Accuracy, relative to the spectral norm.

    Returns:
        Eigenvalues, ascending, float64.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    norm = spectral_norm(product, like)
    if norm == 0:
        return torch.zeros(2, dtype=torch.float64)
    ends = [
        (_eigsh(lambda V: norm * V - product(V), like, count, tol) - norm) * -1,
        _eigsh(lambda V: norm * V + product(V), like, count, tol) - norm,
    ]
    return torch.cat(ends).sort().values


def spectral_norm(product: Product, like: Tensor, tol: float = 1e-2) -> float:
    """Largest eigenvalue in absolute value, by Lanczos.

    Args:
        product: The matrix.
        like: A tensor of the shape, dtype and device that it multiplies.
        tol: Relative accuracy.

    Returns:
        The norm.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    probe = torch.as_tensor(_start(like.numel())).reshape(like.shape).to(like)
    if not product(probe).any():
        return 0.0  # ARPACK does not converge on a zero matrix
    return float(_eigsh(product, like, 1, tol, which="LM").abs()[-1])


def _eigsh(product: Product, like: Tensor, count: int, tol: float, which: str = "LA") -> Tensor:
    n = like.numel()
    if n <= count + 1:  # ARPACK wants fewer eigenvalues than there are
        unit = torch.eye(n).to(like).reshape(n, *like.shape)
        values: Tensor = torch.linalg.eigvalsh(torch.stack([product(e).flatten() for e in unit]).double().cpu())
        return values
    eigsh = need("scipy.sparse.linalg", "Lanczos' method").eigsh
    found = eigsh(_operator(product, like), k=count, which=which, tol=tol, v0=_start(n), return_eigenvectors=False)
    return torch.as_tensor(found)


def solve(
    product: Product, damping: float, gradient: Tensor, tol: float = 1e-3, iterations: int = 500
) -> tuple[Tensor, bool]:
    """(M + λI)⁻¹ g by ``scipy.sparse.linalg.minres``; M + λI may be indefinite.

    Args:
        product: M.
        damping: λ.
        gradient: g, [*B, d_out, d_in].
        tol: Stop at a residual of ``tol`` ‖M + λI‖ ‖solution‖, which is more than ``tol`` ‖g‖ where M + λI is
            ill-conditioned.
        iterations: Products at most.

    Returns:
        The solution, shaped like ``gradient``, and whether MINRES stopped by itself within ``iterations``.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    minres = need("scipy.sparse.linalg", "solve()").minres
    g = gradient.flatten().double().cpu().numpy()
    solution, info = minres(_operator(product, gradient), g, shift=-damping, rtol=tol, maxiter=iterations)
    return torch.as_tensor(solution).reshape(gradient.shape).to(gradient), info == 0


def nearest_kronecker_lanczos(
    rearranged: Callable[[Tensor], Tensor],
    transposed: Callable[[Tensor], Tensor],
    d_in: int,
    d_out: int,
    like: Tensor,
    tol: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Find the nearest Kronecker product by Lanczos on the rearranged operator (``scipy.sparse.linalg.svds``).

    For M = Σ_m A_m ⊗ G_m the rearranged matrix R(M) maps X [d_out, d_out] to Σ_m A_m ⟨G_m, X⟩.

    Args:
        rearranged: X ↦ R(M) X, [d_out, d_out] → [d_in, d_in].
        transposed: U ↦ R(M)ᵀ U, [d_in, d_in] → [d_out, d_out].
        d_in: Size of A.
        d_out: Size of G.
        like: Gives dtype and device.
        tol: Relative accuracy of the singular value.

    Returns:
        A [d_in, d_in] and G [d_out, d_out], of equal norm, with tr(A) ≥ 0; zero for a zero matrix.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    linalg = need("scipy.sparse.linalg", "nearest_kronecker_lanczos()")

    def wrap(function: Callable[[Tensor], Tensor], d: int) -> Callable[[Any], Any]:
        def multiply(v: Any) -> Any:
            X = torch.as_tensor(v, dtype=torch.float64).reshape(d, d).to(like)
            return function(X).flatten().double().cpu().numpy()

        return multiply

    shape = (d_in**2, d_out**2)
    operator = linalg.LinearOperator(shape, matvec=wrap(rearranged, d_out), rmatvec=wrap(transposed, d_in), dtype=float)
    if not operator.matvec(_start(d_out**2)).any():  # ARPACK does not start on a zero matrix
        A, G = torch.zeros(d_in, d_in).to(like), torch.zeros(d_out, d_out).to(like)
    elif min(shape) == 1:  # svds wants at least two singular values to choose from
        one = torch.ones(1, 1).to(like)
        A, G = (rearranged(one), one) if d_out == 1 else (one, transposed(one))
    else:
        u, s, vT = linalg.svds(operator, k=1, tol=tol, v0=_start(min(shape)))
        A = torch.as_tensor(u[:, 0] * s[0] ** 0.5).reshape(d_in, d_in).to(like)
        G = torch.as_tensor(vT[0] * s[0] ** 0.5).reshape(d_out, d_out).to(like)
    return (-A, -G) if A.trace() < 0 else (A, G)


def nearest_kronecker_of_roots(V: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Find the product nearest to Σ_m σ_m vec(V_m) vec(V_m)ᵀ, as the Gauss-Newton matrix is given, by Lanczos.

    Its rearranged operator is X ↦ Σ_m σ_m V_mᵀ X V_m: the matrix itself, p × p, is never formed.

    Args:
        V: The V_m, [M, d_out, d_in].
        sigma: Their signs, [M].

    Returns:
        A [d_in, d_in] and G [d_out, d_out].
    """
    sigma = sigma[:, None, None]

    def rearranged(X: Tensor) -> Tensor:
        # Σ_m V_mᵀ (X V_m) as one product of tall matrices.
        return V.flatten(0, 1).T @ (X @ V).mul_(sigma).flatten(0, 1)

    def transposed(U: Tensor) -> Tensor:
        VU, flat = (V @ U).mul_(sigma).transpose(0, 1).flatten(1), V.transpose(0, 1).flatten(1)
        return VU @ flat.T

    return nearest_kronecker_lanczos(rearranged, transposed, V.shape[-1], V.shape[-2], V)
