"""The ladder itself: one matrix for each approximation of a layer's Hessian block, from exact to one product."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from kfqn_ext.curvature.factors import HoldsInverses, held_inverses
from kfqn_ext.curvature.metrics import damped_solve
from kfqn_ext.curvature.problem import LayerLoss
from kfqn_ext.curvature.products import OutputHessian
from kfqn_ext.curvature.report import HELD
from kfqn_ext.curvature.sums import KroneckerSums, one_product_per_datum, uncorrelated_locations
from kfqn_ext.curvature.vec import unvec, vec
from kfqn_ext.linalg import kronecker_matmul
from kfqn_ext.linalg.nearest import kron

Extra = Callable[[str], Mapping[str, Tensor | tuple[Tensor, Tensor]]]
"""For a layer's name: further rungs by name, each a matrix in the paper's order or two Kronecker factors."""


@dataclass(frozen=True)
class Rung:
    """One approximation of a layer's Hessian block.

    Attributes:
        name: What it is.
        label: Where the paper has it; "" where it has not.
        matrix: [G, p, p] with p = d_in · d_out in the paper's order; G blocks, one a channel group.
        damping: λ that the matrix already contains.
        held: H_A and H_G, where it is held as the inverse H_A ⊗ H_G.
    """

    name: str
    label: str
    matrix: Tensor
    damping: float = 0.0
    held: "Held | None" = None

    def direction(self, gradient: Tensor, damping: float) -> Tensor:
        """What it makes of a gradient: H_G g H_A where it is held as an inverse, otherwise (matrix + λI)⁻¹ g.

        Args:
            gradient: vec(∂W), [G, p].
            damping: λ.

        Returns:
            [G, p].
        """
        if self.held is None:
            return damped_solve(self.matrix, damping - self.damping, gradient)
        H_A, H_G = self.held.H_A, self.held.H_G
        return vec(kronecker_matmul(H_G, unvec(gradient, H_G.shape[-1]), H_A))


@dataclass(frozen=True)
class Facts:
    """The factors of a layer's single Kronecker products. G blocks come first, also where G = 1.

    Attributes:
        A: E_n[Σ_t a_t a_tᵀ], ``eq_8``, equal to KFAC's Ω: [G, d_in, d_in].
        G: E_n[mean_t G_{t,t}], ``eq_8``: [G, d_out, d_out].
        Gamma: KFAC's Γ, the mean of G_{t,t}'s Gauss-Newton part, [G, d_out, d_out]; None where it is not known.
        num_data: N.
        num_locations: |T|.
    """

    A: Tensor
    G: Tensor
    Gamma: Tensor | None
    num_data: int
    num_locations: int

    def damped(self, damping: float) -> tuple[Tensor, Tensor]:
        """A + λ_A I and G + λ_G I with ``algo_8``'s split of λ, what K-BFGS wants its H_A and H_G to invert."""
        damping_A, damping_G = self.spatial(damping)
        return plus(self.A, damping_A), plus(self.G, damping_G)

    def spatial(self, damping: float) -> tuple[float, float]:
        """λ_A = √(λ|T|) and λ_G = √(λ/|T|), the split of ``algo_8``."""
        return sqrt(damping * self.num_locations), sqrt(damping / self.num_locations)


@dataclass(frozen=True)
class Held:
    """What an optimizer holds for a layer, and what it aims at. G blocks come first.

    Attributes:
        H_A: [G, d_in, d_in].
        H_G: [G, d_out, d_out].
        damping: λ = λ_A λ_G, which the inverses contain.
        aim_A: (A + λ_A I)⁻¹ with this minibatch's A; NaN, as the others, for λ_A = 0.
        aim_G: (G + λ_G I)⁻¹ with this minibatch's exact G; for an optimizer that keeps a Γ, Γ in place of G.
        start_G: I / λ_G, from which K-BFGS's H_G starts.
    """

    H_A: Tensor
    H_G: Tensor
    damping: float
    aim_A: Tensor
    aim_G: Tensor
    start_G: Tensor

    @classmethod
    def of(cls, problem: LayerLoss, optimizer: HoldsInverses, facts: Facts, damping: float) -> "Held | None":
        """Read what an optimizer holds; None where it holds no inverses for the layer (yet).

        λ_A and λ_G are the optimizer's; where it names none, ``damping`` in ``algo_8``'s split.
        """
        held = held_inverses(optimizer, problem.weight)
        if held is None:
            return None
        H_A, H_G = (
            H.to(problem.W.dtype) if problem.geometry.blocks else H.to(problem.W.dtype).unsqueeze(0)
            for H in held.dense()
        )
        G = facts.Gamma if held.fisher and facts.Gamma is not None else facts.G
        damping_A, damping_G = facts.spatial(damping) if held.dampings is None else held.dampings
        known = ((facts.A, damping_A), (G, damping_G), (torch.zeros_like(G), damping_G))
        aims = [_inverse(M, value) for M, value in known]
        return cls(H_A, H_G, damping if held.damping is None else held.damping, *aims)


def paper_rungs(hessian: OutputHessian, sums: KroneckerSums, facts: Facts) -> list[Rung]:
    """Build the rungs of the paper's derivation, from ``thm_4`` to ``eq_4``.

    Args:
        hessian: Products with the Hessian by the layer's outputs.
        sums: Its sums of Kronecker products.
        facts: The factors.

    Returns:
        The rungs, from the exact one to the single product.
    """
    rungs = [Rung("Σ A_tt' ⊗ G_tt'", "thm_4", sums.exact)]
    if hessian.coupled:
        rungs.append(Rung("independent data", "", sums.by_datum))
    return [
        *rungs,
        Rung("uncorrelated locations", "eq_{1.5}", uncorrelated_locations(hessian.a, sums.G_tt)),
        Rung("one product per datum", "eq_2.5", one_product_per_datum(hessian.a, sums.G_tt)),
        Rung("A ⊗ G", "eq_4", kron(facts.A, facts.G)),
    ]


def fisher_rungs(gauss_newton: KroneckerSums | None, facts: Facts) -> list[Rung]:
    """Build the Gauss-Newton block and KFAC's Ω ⊗ Γ, with the expectation over the predictive distribution exact.

    Args:
        gauss_newton: The sums of the Gauss-Newton part of the Hessian by the layer's outputs.
        facts: The factors.

    Returns:
        Both rungs; none without the sums.
    """
    if gauss_newton is None or facts.Gamma is None:
        return []
    return [Rung("Gauss-Newton", "", gauss_newton.exact), Rung("Ω ⊗ Γ", "algo_1", kron(facts.A, facts.Gamma))]


def held_rungs(
    problem: LayerLoss, optimizers: Mapping[str, HoldsInverses], facts: Facts, damping: float
) -> Iterator[Rung | str]:
    """Build H_A⁻¹ ⊗ H_G⁻¹ of each optimizer, or say that it has none.

    Args:
        problem: The layer.
        optimizers: By the name to show.
        facts: The factors.
        damping: λ of an optimizer that names none.

    Yields:
        A rung, or a remark.
    """
    for name, optimizer in optimizers.items():
        held = Held.of(problem, optimizer, facts, damping)
        if held is None:
            yield f"{name} holds no H_A and H_G for layer {problem.name} (yet)."
            continue
        matrix = kron(torch.linalg.inv(held.H_A), torch.linalg.inv(held.H_G))
        yield Rung(f"{name}: {HELD}", "eq_18", matrix, held.damping, held)


def extra_rungs(problem: LayerLoss, extra: Extra | None) -> list[Rung]:
    """Build the caller's own rungs.

    Raises:
        ValueError: If a matrix does not have the block's shape.
    """
    geometry, rungs = problem.geometry, []
    p = geometry.d_in * geometry.d_out
    for name, given in (extra(problem.name) if extra is not None else {}).items():
        matrix = given if isinstance(given, Tensor) else kron(*given)
        if matrix.shape != (*geometry.blocks, p, p):
            raise ValueError(
                f"Rung {name!r} of layer {problem.name} has shape {list(matrix.shape)}, not "
                f"{[*geometry.blocks, p, p]}: columns of W = [weight, bias] stacked, one block a channel group."
            )
        matrix = matrix.detach().to(problem.W)
        rungs.append(Rung(name, "", matrix if geometry.blocks else matrix.unsqueeze(0)))
    return rungs


def plus(matrix: Tensor, damping: float | Tensor) -> Tensor:
    """M + λI: [*B, d, d], λ a number or [*B]."""
    damping = damping.to(matrix).unsqueeze(-1) if isinstance(damping, Tensor) else damping
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    return damped


def _inverse(matrix: Tensor, damping: float | Tensor) -> Tensor:
    """(M + λI)⁻¹; NaN where there is no λ, without which M may have no inverse."""
    inverse = torch.linalg.inv_ex(plus(matrix, damping)).inverse
    damped = torch.as_tensor(damping, device=matrix.device) > 0
    return torch.where(damped[..., None, None], inverse, torch.nan)
