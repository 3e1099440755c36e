"""Kronecker factors of a layer, by definition: A and G of ``eq_8``, Ω and Γ of ``algo_1``, and an optimizer's."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import OutputHessian, loss_hessian, one_tensor
from kfqn_ext.linalg import compact_matrix


class HasState(Protocol):
    """An optimizer as this package sees it: state by parameter, and groups with hyperparameters."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """State by parameter."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters."""


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


def output_hessian_roots(problem: LayerLoss, z: Tensor) -> Tensor:
    """S with S Sᵀ = the Hessian of one datum's loss by its output z(n), for all data: [N, K, K].

    Negative eigenvalues, which a convex loss has none of, are left out.
    """
    product = loss_hessian(problem, z)
    N, K = z.shape[0], z[0].numel()
    H = z.new_empty(N, K, K)
    for k in range(K):
        v = z.new_zeros(N, K)
        v[:, k] = N  # of f, a mean over data: N of it are one datum's
        H[:, k] = product(v.reshape(z.shape)).reshape(N, K)
    values, vectors = torch.linalg.eigh(H)
    roots: Tensor = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return roots


def fisher_roots(problem: LayerLoss, hessian: OutputHessian, probes: int | None = None) -> Iterator[Tensor]:
    """Gradients by the layer's outputs whose outer products sum to the expected Fisher matrix by these outputs.

    One for each column s(n) of the root of the loss's Hessian: Σ_n (∂z/∂h)ᵀ s(n) for all data at once, or one datum
    at a time where data are coupled.

    Args:
        problem: The layer.
        hessian: Its output Hessian; its graph of the model's output is used.
        probes: Where data are coupled: give all data random signs, this often, in place of one datum at a time.
            The sum then has the right expectation.

    Yields:
        [N, T, G, d_out].

    Raises:
        TypeError: If the model's output is not one tensor.
    """
    z = one_tensor(hessian.output).detach()
    S = output_hessian_roots(problem, z)
    generator = torch.Generator(z.device).manual_seed(0)
    for k in range(S.shape[-1]):
        column = S[:, :, k].reshape(z.shape)
        if not hessian.coupled:
            yield hessian.pull_output(column)
            continue
        for _ in range(probes or 0):
            sign = signs(S[:, 0, 0], generator).reshape(-1, *(1,) * (z.ndim - 1))
            yield hessian.pull_output(column * sign) / (probes or 1) ** 0.5
        for n in range(0 if probes else S.shape[0]):
            one = torch.zeros_like(column)
            one[n] = column[n]
            yield hessian.pull_output(one)


def gauss_newton_roots(problem: LayerLoss, hessian: OutputHessian, probes: int | None = None) -> Iterator[Tensor]:
    """Matrices V_m with Σ_m vec(V_m) vec(V_m)ᵀ = the generalized Gauss-Newton block, N · K of them in all.

    Args:
        problem: The layer.
        hessian: Its output Hessian.
        probes: As :func:`fisher_roots`.

    Yields:
        [M, G, d_out, d_in], M of them at a time.

    Raises:
        TypeError: If the model's output is not one tensor.
    """
    a = hessian.a / hessian.a.shape[0] ** 0.5
    for root in fisher_roots(problem, hessian, probes):
        V = torch.einsum("ntgo,ntgj->ngoj", root, a)
        yield V.sum(0, keepdim=True) if hessian.coupled else V


def expected_fisher_factor(problem: LayerLoss, hessian: OutputHessian, probes: int | None = None) -> Tensor:
    """Γ = E_n[mean_t E_ŷ[∂h_t ∂h_tᵀ]], ``algo_1``, with the expectation over the predictive distribution taken exactly.

    The predictive distribution is the one whose negative log-likelihood is the loss: the softmax for cross entropy,
    a Gaussian for squared loss. Its Fisher matrix at the output is the Hessian of the loss there, so that the
    expectation needs no samples ("type-2").

    Args:
        problem: The layer.
        hessian: Its output Hessian.
        probes: As :func:`fisher_roots`.

    Returns:
        [G, d_out, d_out].

    Raises:
        TypeError: If the model's output is not one tensor.
    """
    N, T = hessian.a.shape[:2]
    Gamma: Tensor | float = 0.0
    for root in fisher_roots(problem, hessian, probes):
        rows = root.flatten(0, 1)
        Gamma = Gamma + torch.einsum("mgi,mgo->gio", rows, rows)
    assert isinstance(Gamma, Tensor)
    return Gamma / (N * T)


def held_inverses(optimizer: HasState, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The H_A and H_G that an optimizer holds for a layer, ``eq_18``.

    Args:
        optimizer: Any object with ``state[weight]`` holding ``H_A`` and ``H_G``, or ``pairs``, ``K`` and ``gamma``.
        weight: The layer's weight.
        dtype: Dtype of the result.

    Returns:
        H_A [*B, d_in, d_in] and H_G [*B, d_out, d_out], or None where it holds none (yet).
    """
    state = optimizer.state.get(weight, {})
    if "H_A" not in state:
        return None
    H_A = state["H_A"].detach().to(dtype)
    if "H_G" in state:
        return H_A, state["H_G"].detach().to(dtype)
    if "pairs" in state:
        return H_A, compact_matrix(*(state[key].detach().to(dtype) for key in ("pairs", "K", "gamma")))
    return None


def held_damping(optimizer: HasState, weight: Tensor) -> float | None:
    """λ of the group that holds a weight; None where there is none."""
    for group in getattr(optimizer, "param_groups", ()):
        if any(p is weight for p in group["params"]):
            value = group.get("damping")
            return None if value is None else float(value)
    return None
