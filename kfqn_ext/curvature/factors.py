"""Kronecker factors of a layer, by definition: A and G of ``eq_8``, Ω and Γ of ``algo_1``, and an optimizer's."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import OutputHessian, couples_data, loss_hessian, one_tensor
from kfqn_ext.linalg.operators import Inverses


class HoldsInverses(Protocol):
    """An optimizer as this package sees it."""

    def inverses(self, weight: Tensor) -> Inverses | None:
        """H_A and H_G of the layer with this weight; None where it holds none (yet)."""


NOT_CONVEX = (
    "The loss is not convex in the model's output: Gauss-Newton and Γ are made of its Hessian there, negative "
    "eigenvalues included, and are no Fisher matrices."
)


def gram(a: Tensor) -> Tensor:
    """A = Ω = E_n[Σ_t a_t a_tᵀ], ``eq_8``: [N, T, G, d_in] → [G, d_in, d_in]."""
    rows = a.flatten(0, 1)
    return torch.einsum("mgj,mgk->gjk", rows, rows) / a.shape[0]


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw independent signs shaped like a tensor: of all probes z with E zzᵀ = I those of least variance."""
    return (2 * torch.randint(0, 2, like.shape, generator=generator, device=generator.device) - 1).to(like)


def sampled_output_factor(hessian: OutputHessian, probes: int, progress: bool = False) -> Tensor:
    """Estimate G = E_n[mean_t G_{t,t}(n)], ``eq_8``, with random signs on data and locations.

    Products with a sign for each datum and location keep, in expectation, what belongs to one location of one datum.

    Args:
        hessian: Products with the Hessian by the layer's outputs.
        probes: How many; d_out products each. For one location and independent data one probe is exact.
        progress: Whether to show a progress bar.

    Returns:
        [G, d_out, d_out], symmetric.
    """
    N, T, groups, d = hessian.gradient.shape
    generator = torch.Generator(hessian.gradient.device).manual_seed(0)
    G = hessian.gradient.new_zeros(groups, d, d)
    for _ in range(probes):
        z = signs(hessian.gradient[..., 0], generator)
        for i in tqdm(range(d), desc="rows of G", disable=not progress, leave=False):
            v = torch.zeros_like(hessian.gradient)
            v[..., i] = z
            G[:, i] += torch.einsum("ntg,ntgo->go", z, hessian(v)) / (T * probes)
    return (G + G.mT) / 2


def outputs_by_datum(problem: LayerLoss, hessian: OutputHessian) -> Tensor:
    """The model's output, detached, where its N equal parts are the N data's outputs, in their order.

    Raises:
        TypeError: If the output is not one tensor.
        ValueError: If its rows are not the data's, or the loss compares data.
    """
    z, N = one_tensor(hessian.output).detach(), hessian.a.shape[0]
    if z.numel() % N == 0:
        rows, loss = z.reshape(N, -1), loss_hessian(problem, z)
        apart = not couples_data(lambda v: loss(v.reshape(z.shape)).reshape(N, -1), rows)
        # Where the model itself couples data, a row reaches them all.
        if apart and (hessian.coupled or not couples_data(lambda v: hessian.pull_output(v.reshape(z.shape)), rows)):
            return z
    raise ValueError(
        f"The loss of the model's output {list(z.shape)} is not one of {N} data apart, in their order: Γ and "
        "Gauss-Newton's roots are left out. curvature_ladder needs no such order."
    )


Roots = list[tuple[float, Tensor]]
"""Matrices S with a sign σ, for Σ σ S Sᵀ: a positive part, and a negative one where there is any."""


def output_hessian_roots(problem: LayerLoss, z: Tensor, N: int) -> Roots:
    """S with Σ σ S Sᵀ = the Hessian of one datum's loss by its output z(n), for all data.

    Args:
        problem: The layer.
        z: The model's output, as :func:`outputs_by_datum`: N · K numbers.
        N: The number of data.

    Returns:
        S [N, K, K] with σ = 1; also with σ = -1 where the loss is not convex.
    """
    product = loss_hessian(problem, z)
    K = z.numel() // N
    H = z.new_empty(N, K, K)
    for k in range(K):
        v = z.new_zeros(N, K)
        v[:, k] = N  # of f, a mean over data: N of it are one datum's
        H[:, k] = product(v.reshape(z.shape)).reshape(N, K)
    values, vectors = torch.linalg.eigh(H)
    convex = not has_negative(values)
    return [
        (sign, vectors * (sign * values).clamp(min=0).sqrt().unsqueeze(-2))
        for sign in ((1.0,) if convex else (1.0, -1.0))
    ]


def has_negative(values: Tensor) -> bool:
    """Whether eigenvalues are negative beyond rounding."""
    return bool(values.min() < -1e3 * torch.finfo(values.dtype).eps * values.abs().max())


def fisher_roots(hessian: OutputHessian, roots: Roots, probes: int) -> Iterator[tuple[float, Tensor]]:
    """Gradients by the layer's outputs whose outer products sum to the expected Fisher matrix by these outputs.

    One for each column s(n) of the roots of the loss's Hessian: Σ_n (∂z/∂h)ᵀ s(n) for all data at once. Where data
    are coupled they get random signs, ``probes`` times a column, so that the sum has the right expectation.

    Args:
        hessian: The layer's output Hessian; its graph of the model's output is used.
        roots: As :func:`output_hessian_roots`.
        probes: Draws of signs.

    Yields:
        σ and [N, T, G, d_out].
    """
    z = one_tensor(hessian.output)
    generator = torch.Generator(z.device).manual_seed(0)
    for sigma, S in roots:
        for column in S.unbind(-1):
            if not hessian.coupled:
                yield sigma, hessian.pull_output(column.reshape(z.shape))
                continue
            for _ in range(probes):
                signed = column * signs(S[:, :1, 0], generator)
                yield sigma, hessian.pull_output(signed.reshape(z.shape)) / probes**0.5


def gauss_newton_roots(hessian: OutputHessian, roots: Roots, probes: int) -> Iterator[tuple[float, Tensor]]:
    """Matrices V_m with Σ_m σ_m vec(V_m) vec(V_m)ᵀ = the generalized Gauss-Newton block, N · K of them in all.

    Args:
        hessian: The layer's output Hessian.
        roots: As :func:`output_hessian_roots`.
        probes: As :func:`fisher_roots`.

    Yields:
        σ and [M, G, d_out, d_in], M of them at a time.
    """
    a = hessian.a / hessian.a.shape[0] ** 0.5
    for sigma, root in fisher_roots(hessian, roots, probes):
        V = torch.einsum("ntgo,ntgj->ngoj", root, a)
        yield sigma, V.sum(0, keepdim=True) if hessian.coupled else V


def expected_fisher_factor(hessian: OutputHessian, roots: Roots, probes: int) -> Tensor:
    """Γ = E_n[mean_t E_ŷ[∂h_t ∂h_tᵀ]], ``algo_1``, with the expectation over the predictive distribution taken exactly.

    The predictive distribution is the one whose negative log-likelihood is the loss: the softmax for cross entropy,
    a Gaussian for squared loss. Its Fisher matrix at the output is the Hessian of the loss there, so that the
    expectation needs no samples ("type-2").

    Args:
        hessian: The layer's output Hessian.
        roots: As :func:`output_hessian_roots`.
        probes: As :func:`fisher_roots`.

    Returns:
        [G, d_out, d_out].
    """
    N, T, groups, d = hessian.gradient.shape
    Gamma = hessian.gradient.new_zeros(groups, d, d)
    for sigma, root in fisher_roots(hessian, roots, probes):
        rows = root.flatten(0, 1)
        Gamma += sigma * torch.einsum("mgi,mgo->gio", rows, rows)
    return Gamma / (N * T)


def held_inverses(optimizer: HoldsInverses, weight: Tensor) -> Inverses | None:
    """What an optimizer holds for a layer; None where it holds nothing, as any other than this package's."""
    return optimizer.inverses(weight) if hasattr(optimizer, "inverses") else None


def held_damping(optimizers: Mapping[str, HoldsInverses], weight: Tensor) -> float | None:
    """λ of the first optimizer that names one for a layer; None where none does."""
    held = (held_inverses(optimizer, weight) for optimizer in optimizers.values())
    return next((h.damping for h in held if h is not None and h.damping is not None), None)
