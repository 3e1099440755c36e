"""``estimate_curvature``: the ladder for layers whose block is too large to form."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kfqn_ext.curvature import metrics
from kfqn_ext.curvature.comparison import add_factor_errors
from kfqn_ext.curvature.entry import measuring
from kfqn_ext.curvature.estimates import Probed
from kfqn_ext.curvature.exact import mebibytes
from kfqn_ext.curvature.factors import (
    NOT_CONVEX,
    HoldsInverses,
    Roots,
    expected_fisher_factor,
    gauss_newton_roots,
    gram,
    held_damping,
    output_hessian_roots,
    outputs_by_datum,
    sampled_output_factor,
)
from kfqn_ext.curvature.krylov import nearest_kronecker_of_roots, spectral_norm
from kfqn_ext.curvature.ladder import COUPLED, by_name, check_numbers, default_damping, indefinite, used_layers
from kfqn_ext.curvature.operators import IdentityOperator, KroneckerOperator, Multiplication, Operator, RootsOperator
from kfqn_ext.curvature.problem import LayerLoss, LossFn
from kfqn_ext.curvature.products import HessianProduct, OutputHessian
from kfqn_ext.curvature.report import FLOOR, GRADIENT, HELD, CurvatureReport, LayerReport, Row
from kfqn_ext.curvature.rungs import Facts, Held
from kfqn_ext.linalg import kronecker_matmul


@dataclass(frozen=True)
class OperatorRung:
    """A rung that is not formed; the attributes are those of :class:`~kfqn_ext.curvature.rungs.Rung`."""

    name: str
    label: str
    operator: Operator
    damping: float = 0.0
    held: Held | None = None

    def direction(self, gradient: Tensor, damping: float) -> tuple[Tensor, bool]:
        """(M + λI)⁻¹ g, or H_G g H_A: [*B, d_out, d_in]; and whether it is solved to the method's accuracy."""
        if self.held is not None:
            H_A, H_G = (H.reshape(*gradient.shape[:-2], *H.shape[-2:]) for H in (self.held.H_A, self.held.H_G))
            return kronecker_matmul(H_G, gradient, H_A), True
        return self.operator.solve(damping - self.damping, gradient)


@measuring()
def estimate_curvature(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layers: Sequence[str | nn.Module] | None = None,
    optimizers: Mapping[str, HoldsInverses] | HoldsInverses | None = None,
    *,
    damping: float | None = None,
    probes: int = 16,
    location_probes: int = 2,
    spectra: bool = True,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    memory_budget: int = 2**30,
    progress: bool = True,
) -> CurvatureReport:
    """Compare a large layer's exact Hessian with its approximations by products only.

    Frobenius errors and cosines are estimated from ``probes`` Hessian-vector products with random signs and come
    with standard errors; extreme eigenvalues and spectral errors are Lanczos', Newton's direction is MINRES', both
    scipy's. The factors of each rung are exact except G, which ``location_probes`` random signs estimate. The
    nearest Kronecker product is that of the Gauss-Newton matrix, by Lanczos on its rearranged operator: it is the
    exact block's floor where both are equal, as in piecewise linear networks with BatchNorm in evaluation mode.

    Example:
        >>> import torch
        >>> from kfqn_ext.curvature import estimate_curvature
        >>> model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        >>> x, y = torch.rand(8, 6), torch.arange(8) % 2
        >>> report = estimate_curvature(model, torch.nn.functional.cross_entropy, x, y, ["0"], progress=False)
        >>> row = report["0", "A ⊗ G"]
        >>> row.error > 0, row.error_se > 0
        (True, True)

    Args:
        model: The model; it is left untouched, see :func:`exact_block`.
        loss_fn: Maps (model output, y) to a scalar, a mean over data.
        x: The model's input, one minibatch.
        y: The targets.
        layers: Names of layers, or layers; all that can be measured if None.
        optimizers: Trained optimizers of this model by the name to show, or one.
        damping: λ, as :func:`curvature_ladder`.
        probes: Hessian-vector products for norms and inner products; at least 2.
        location_probes: Random signs for G, d_out products each. Data and locations average their noise out.
        spectra: Whether to compute extreme eigenvalues and spectral errors: some 30 products a rung.
        seed: Seed of the probes; the global generators are not used.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the Gauss-Newton matrix's N · K roots may take, K the size of a datum's output, and
            before them the Hessians of N losses by K outputs. Rungs that need more are left out, with a note.
        progress: Whether to show progress bars.

    Returns:
        The report, without pictures of matrices.

    Raises:
        ValueError: As :func:`curvature_ladder`; and for fewer than two probes.
        UnsupportedLayerError: As :func:`exact_block`.
        ModuleNotFoundError: If scipy is not installed.
    """
    if probes < 2 or location_probes < 1:
        raise ValueError(f"probes={probes} must be at least 2, location_probes={location_probes} at least 1.")
    check_numbers(model, damping, dtype)
    problems, notes = used_layers(model, loss_fn, x, y, layers, dtype)
    report = []
    for problem in problems:
        estimate = _LayerEstimate(problem, by_name(optimizers), location_probes, memory_budget, progress)
        report.append(estimate.run(damping, probes, spectra, seed))
    return CurvatureReport(report, notes)


class _LayerEstimate:
    """One layer's operators and what is measured of them."""

    def __init__(
        self,
        problem: LayerLoss,
        optimizers: Mapping[str, HoldsInverses],
        location_probes: int,
        memory_budget: int,
        progress: bool,
    ) -> None:
        self.problem, self.optimizers, self.notes = problem, optimizers, list[str]()
        self.bar = partial(tqdm, disable=not progress, leave=False)
        self.progress = progress
        self.roots: tuple[Tensor, Tensor] | None = None  # V_m and σ_m
        self._newton: dict[float, Tensor] = {}
        self.facts = self._measure(location_probes, memory_budget)
        self.hessian = HessianProduct(problem)

    def _measure(self, location_probes: int, memory_budget: int) -> Facts:
        """Patches, factors and roots; the graph by the outputs is let go afterwards."""
        hessian = OutputHessian(self.problem)
        N, T = hessian.a.shape[:2]
        exact = T == 1 and not hessian.coupled and hessian.a.shape[2] == 1
        G = sampled_output_factor(hessian, 1 if exact else location_probes, self.progress)
        if not exact:
            self.notes.append(f"G is estimated with {location_probes} random signs for each location.")
        if hessian.coupled:
            self.notes.append(COUPLED)
        Gamma, roots = None, self._loss_roots(hessian, memory_budget)
        if roots is not None:
            Gamma = expected_fisher_factor(hessian, roots, location_probes)
            self._keep_roots(hessian, roots, location_probes, memory_budget)
        return Facts(gram(hessian.a), G, Gamma, N, T)

    def _fits(self, what: str, numbers: int, memory_budget: int) -> bool:
        size = numbers * self.problem.W.element_size()
        if size > memory_budget:
            budget = mebibytes(memory_budget)
            self.notes.append(f"{what} take {mebibytes(size)}, above memory_budget ({budget}): left out.")
        return size <= memory_budget

    def _loss_roots(self, hessian: OutputHessian, memory_budget: int) -> Roots | None:
        """Roots of the loss's Hessian by the outputs of each datum."""
        try:
            z = outputs_by_datum(self.problem, hessian)
        except (TypeError, ValueError) as error:
            self.notes.append(str(error))
            return None
        N = hessian.a.shape[0]
        K = z.numel() // N
        # The Hessians, their eigenvectors, and roots of either sign.
        if not self._fits(f"Γ's {N} Hessians by {K} outputs", 4 * N * K**2, memory_budget):
            return None
        roots = output_hessian_roots(self.problem, z, N)
        self.notes += [NOT_CONVEX] if len(roots) > 1 else []
        return roots

    def _keep_roots(self, hessian: OutputHessian, roots: Roots, probes: int, memory_budget: int) -> None:
        N, K, _ = roots[0][1].shape
        count = len(roots) * K * (probes if hessian.coupled else N)
        if not self._fits(f"The Gauss-Newton matrix's {count} roots", count * self.problem.W.numel(), memory_budget):
            return
        sigmas, parts = zip(*gauss_newton_roots(hessian, roots, probes), strict=True)
        V = torch.cat(parts)
        sigma = torch.tensor(sigmas).to(V).repeat_interleave(len(parts[0]))
        self.roots = (V if self.problem.geometry.blocks else V.squeeze(1), sigma)

    def _blocks(self, factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return factors if self.problem.geometry.blocks else tuple(f.squeeze(0) for f in factors)

    def _rungs(self, damping: float) -> Iterator[OperatorRung]:
        facts, blocks = self.facts, self.problem.geometry.blocks
        yield OperatorRung("A ⊗ G", "eq_4", KroneckerOperator(*self._blocks((facts.A, facts.G))))
        aims = KroneckerOperator(*self._blocks(facts.damped(damping)))
        yield OperatorRung("(A + λ_A I) ⊗ (G + λ_G I)", "algo_8", aims, damping)
        for name, optimizer in self.optimizers.items():
            held = Held.of(self.problem, optimizer, facts, damping)
            if held is None:
                self.notes.append(f"{name} holds no H_A and H_G for layer {self.problem.name} (yet).")
                continue
            operator = KroneckerOperator(*self._blocks((torch.linalg.inv(held.H_A), torch.linalg.inv(held.H_G))))
            yield OperatorRung(f"{name}: {HELD}", "eq_18", operator, held.damping, held)
        yield OperatorRung(GRADIENT, "", IdentityOperator(damping), damping)
        if self.roots is not None:
            yield OperatorRung("Gauss-Newton", "", RootsOperator(*self.roots))
        if facts.Gamma is not None:
            yield OperatorRung("Ω ⊗ Γ", "algo_1", KroneckerOperator(*self._blocks((facts.A, facts.Gamma))))
        if self.roots is not None:
            V, sigma = self.roots
            by_block = V.transpose(0, 1) if blocks else V.unsqueeze(0)
            nearest = [nearest_kronecker_of_roots(V, sigma) for V in by_block]
            A, G = (torch.stack(factors) for factors in zip(*nearest, strict=True))
            yield OperatorRung(f"{FLOOR} (of Gauss-Newton)", "", KroneckerOperator(*self._blocks((A, G))))

    def run(self, damping: float | None, probes: int, spectra: bool, seed: int) -> LayerReport:
        """Measure all rungs."""
        like, exact = self.problem.W.detach(), Multiplication(self.hessian)
        ends = exact.extremes(like) if spectra or damping is None else None
        lam = self._damping(damping, ends)
        self.notes += [] if ends is None else indefinite(float(ends[0]), lam)
        rungs = [OperatorRung("exact block", "", exact), *self._rungs(lam)]
        identity = Multiplication(lambda V: V)
        rounds = self.bar(range(probes), desc=f"{self.problem.name}: probes")
        probed = Probed.of([r.operator for r in rungs] + [identity], like, probes, seed, rounds)
        sizes = (self.facts.num_data, self.facts.num_locations)
        report = LayerReport(self.problem.name, self.problem.geometry, *sizes, self.notes)
        for i, rung in enumerate(self.bar(rungs, desc=f"{self.problem.name}: rungs")):
            row = Row(rung.name, rung.label, rung.damping or lam)
            self._add_norms(row, rung, probed, i)
            if rung.held is not None:
                add_factor_errors(row, rung.held)
            self._add_direction(row, rung, lam, ends)
            values = self._add_spectrum(row, rung, exact, ends) if spectra and ends is not None else None
            report.add(row, values)
        return report

    def _damping(self, damping: float | None, ends: Tensor | None) -> float:
        if damping is not None:
            return damping
        held = held_damping(self.optimizers, self.problem.weight)
        if held is not None:
            return held
        assert ends is not None
        return default_damping(float(ends[0]), float(ends[-1]))

    def _add_norms(self, row: Row, rung: OperatorRung, probed: Probed, i: int) -> None:
        identity = probed.inner.shape[-1] - 1
        error, cosine = probed.relative_error(i), probed.cosine(i)
        row.error, row.error_se, row.cosine, row.cosine_se = *_pair(error), *_pair(cosine)
        aim = {0: -1.0, identity: -row.damping} if rung.damping else {0: -1.0}
        aim[i] = aim.get(i, 0.0) + 1.0
        row.damped_error = probed.ratio(aim, {0: 1.0, identity: row.damping}).value

    def _add_direction(self, row: Row, rung: OperatorRung, damping: float, ends: Tensor | None) -> None:
        g, lam, B = self.hessian.gradient, row.damping, self.hessian
        if lam not in self._newton:
            self._newton[lam] = self._solved("Newton's direction", *Multiplication(B).solve(lam, g))
        newton = self._newton[lam]
        d = newton if rung.name == "exact block" else self._solved(rung.name, *rung.direction(g, damping))
        bend, newton_bend = ((v * B(v)).sum() for v in (d, newton))
        row.angle = metrics.angle(d, newton)
        row.decrease = metrics.best_decrease(g, d, bend)
        share = metrics.best_decrease(g, d, bend + lam * (d * d).sum())
        best = metrics.best_decrease(g, newton, newton_bend + lam * (newton * newton).sum())
        definite = ends is None or float(ends[0]) + lam > 0
        row.share = share / best if definite and 0 < best < math.inf else math.nan

    def _solved(self, name: str, direction: Tensor, converged: bool) -> Tensor:
        if not converged:
            self.notes.append(f"{name}: MINRES reached its last iteration, so that angle and shares are not exact.")
        return direction

    def _add_spectrum(self, row: Row, rung: OperatorRung, exact: Operator, ends: Tensor) -> Tensor:
        values = ends if rung.operator is exact else rung.operator.extremes(self.problem.W.detach())
        row.lowest, row.highest = float(values[0]), float(values[-1])
        if len(values) == self.problem.W.numel():
            row.negative_mass = metrics.negative_mass(values)
        if row.error < 1e3 * torch.finfo(self.problem.W.dtype).eps:
            row.spectral_error = 0.0  # what is left is rounding, on which Lanczos does not converge
        else:
            difference = Multiplication(lambda V: rung.operator(V) - exact(V))
            norm = spectral_norm(difference, self.problem.W.detach())
            row.spectral_error = metrics.ratio(norm, ends.abs().max())
        return values


def _pair(estimate: Any) -> tuple[float, float]:
    return estimate.value, estimate.standard_error
