"""``curvature_ladder``: every approximation of a layer's Hessian block beside the exact one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.curvature.exact import MEMORY_BUDGET, check_budget, form
from kfqn_ext.curvature.factors import HasState, expected_fisher_factor, gram, held_damping
from kfqn_ext.curvature.measure import Yardstick
from kfqn_ext.curvature.problem import LayerLoss, LossFn, layer_names
from kfqn_ext.curvature.products import HessianProduct, OutputHessian
from kfqn_ext.curvature.report import FLOOR, GRADIENT, CurvatureReport, LayerReport
from kfqn_ext.curvature.rungs import Extra, Facts, Rung, extra_rungs, fisher_rungs, held_rungs, paper_rungs
from kfqn_ext.curvature.sums import kronecker_sums
from kfqn_ext.curvature.vec import vec
from kfqn_ext.linalg import full_precision
from kfqn_ext.linalg.nearest import kron, nearest_kronecker

# Matrices of the block's size held at a time: the rungs, without the optimizers', and what a comparison works with.
_MATRICES = 16


@full_precision()
def curvature_ladder(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layers: Sequence[str | nn.Module] | None = None,
    optimizers: Mapping[str, HasState] | HasState | None = None,
    *,
    damping: float | None = None,
    extra: Extra | None = None,
    dtype: torch.dtype | None = torch.float64,
    memory_budget: int = 4 * MEMORY_BUDGET,
    progress: bool = True,
) -> CurvatureReport:
    """Compare a layer's exact Hessian block with each of the approximations that lead to K-BFGS and KFAC.

    The rungs: ``thm_4`` (equal to the exact block), ``eq_{1.5}``, ``eq_2.5``, ``eq_4``; what each optimizer holds,
    H_A⁻¹ ⊗ H_G⁻¹; λI, which is gradient descent; the Gauss-Newton block and KFAC's Ω ⊗ Γ; the caller's; and as the
    floor of all single Kronecker products, the nearest one.

    For layers of up to a few thousand parameters: p parameters cost p Hessian-vector products, T · d_out more by the
    outputs (N times as many where data are coupled), and a few eigenvalue problems of size p a rung. See
    :func:`estimate_curvature` for larger ones.

    Example:
        >>> import torch
        >>> from kfqn_ext.curvature import curvature_ladder
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.rand(8, 3), torch.arange(8) % 2
        >>> report = curvature_ladder(model, torch.nn.functional.cross_entropy, x, y, layers=["0"], progress=False)
        >>> report["0", "Σ A_tt' ⊗ G_tt'"].error < 1e-10
        True

    Args:
        model: The model; it is left untouched, see :func:`exact_block`.
        loss_fn: Maps (model output, y) to a scalar, a mean over data.
        x: The model's input, one minibatch.
        y: The targets.
        layers: Names of layers, or layers; all that can be measured if None.
        optimizers: Trained optimizers of this model by the name to show, or one; anything with ``state[weight]``
            holding H_A and H_G.
        damping: λ for the directions of all rungs that hold no damping of their own. If None, the first
            optimizer's; without one, a hundredth of the block's largest eigenvalue in absolute value, plus what
            makes the block positive semidefinite.
        extra: Further rungs of a layer, given its name: ``{name: matrix or (A, G)}``.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the matrices of one layer may take.
        progress: Whether to show progress bars.

    Returns:
        The report: ``print`` it, ``to_dataframe()``, ``plot(path)``.

    Raises:
        ValueError: As :func:`exact_block`.
        UnsupportedLayerError: As :func:`exact_block`.
        MemoryError: If a layer's matrices are larger than the budget.
    """
    problems = [LayerLoss(model, loss_fn, x, y, layer, dtype) for layer in chosen_layers(model, layers)]
    named = by_name(optimizers)
    for problem in problems:
        check_budget(problem, memory_budget, matrices=_MATRICES + len(named))
    return CurvatureReport([layer_ladder(problem, named, damping, extra, progress) for problem in problems])


def chosen_layers(model: nn.Module, layers: Sequence[str | nn.Module] | None) -> Sequence[str | nn.Module]:
    """The layers asked for, or all of the model's.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(layers, (str, nn.Module)):
        return [layers]
    chosen = layer_names(model) if layers is None else layers
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer that can be measured.")
    return chosen


def by_name(optimizers: Mapping[str, HasState] | HasState | None) -> Mapping[str, HasState]:
    """Name a single optimizer by its class."""
    if optimizers is None:
        return {}
    return optimizers if isinstance(optimizers, Mapping) else {type(optimizers).__name__: optimizers}


def layer_ladder(
    problem: LayerLoss,
    optimizers: Mapping[str, HasState],
    damping: float | None = None,
    extra: Extra | None = None,
    progress: bool = False,
) -> LayerReport:
    """Build and measure all rungs of one layer; the arguments are those of :func:`curvature_ladder`."""
    hessian, notes = OutputHessian(problem), list[str]()
    sums = kronecker_sums(hessian, progress)
    facts = facts_of(problem, hessian, sums.G_tt, notes)
    yardstick = Yardstick(*_form_block(problem, progress), facts)
    held = list(held_rungs(problem, optimizers, facts))
    notes += [remark for remark in held if isinstance(remark, str)]
    lam = damping if damping is not None else _default_damping(problem, optimizers, yardstick.spectrum)
    notes += indefinite(float(yardstick.spectrum[0]), lam)
    report = LayerReport(problem.name, problem.geometry, facts.num_data, facts.num_locations, notes)
    for rung in (
        Rung("exact block", "", yardstick.exact),
        *paper_rungs(hessian, sums, facts),
        Rung("(A + λ_A I) ⊗ (G + λ_G I)", "algo_8", kron(*facts.damped(lam)), lam),
        *(rung for rung in held if isinstance(rung, Rung)),
        Rung(
            GRADIENT, "", lam * torch.eye(yardstick.exact.shape[-1]).to(yardstick.exact).expand_as(yardstick.exact), lam
        ),
        *fisher_rungs(problem, hessian, facts),
        *extra_rungs(problem, extra),
        Rung(FLOOR, "", kron(*nearest_kronecker(yardstick.exact, problem.geometry.d_out))),
    ):
        report.add(*yardstick.measure(rung, lam), rung.matrix)
    return report


def facts_of(problem: LayerLoss, hessian: OutputHessian, G_tt: Tensor, notes: list[str]) -> Facts:
    """Collect the layer's factors; ``notes`` is told what is out of the ordinary."""
    N, T = hessian.a.shape[:2]
    if hessian.coupled:
        notes.append("One datum's gradient depends on other data (BatchNorm in training mode?).")
    try:
        Gamma = expected_fisher_factor(problem, hessian)
    except TypeError as error:
        Gamma = None
        notes.append(str(error))
    return Facts(gram(hessian.a), G_tt.mean((0, 1)), Gamma, N, T)


def _form_block(problem: LayerLoss, progress: bool) -> tuple[Tensor, Tensor]:
    """The exact block [G, p, p] and vec of the gradient [G, p]."""
    product = HessianProduct(problem)
    block, gradient = form(problem, product, progress=progress), vec(product.gradient)
    return (block, gradient) if problem.geometry.blocks else (block.unsqueeze(0), gradient.unsqueeze(0))


def _default_damping(problem: LayerLoss, optimizers: Mapping[str, HasState], spectrum: Tensor) -> float:
    held = [held_damping(optimizer, problem.weight) for optimizer in optimizers.values()]
    first = next((value for value in held if value is not None), None)
    return first if first is not None else default_damping(float(spectrum[0]), float(spectrum[-1]))


def indefinite(lowest: float, damping: float) -> list[str]:
    """A remark where B + λI is not positive definite; B's lowest eigenvalue tells."""
    if lowest + damping > 0:
        return []
    return [
        f"B + λI is indefinite, λ = {damping:.2g}, lowest eigenvalue of B {lowest:.2g}: Newton's step is no minimum."
    ]


def default_damping(lowest: float, highest: float) -> float:
    """A hundredth of the spectral norm, and what makes a block with these eigenvalues positive semidefinite."""
    return 0.01 * max(abs(lowest), abs(highest)) + max(0.0, -lowest)
