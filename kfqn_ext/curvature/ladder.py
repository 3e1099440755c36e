"""``curvature_ladder``: every approximation of a layer's Hessian block beside the exact one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext.curvature.comparison import Yardstick
from kfqn_ext.curvature.entry import measuring
from kfqn_ext.curvature.exact import MEMORY_BUDGET, check_budget, form
from kfqn_ext.curvature.factors import NOT_CONVEX, HoldsInverses, gram, has_negative, held_damping
from kfqn_ext.curvature.problem import LayerLoss, LossFn, UnusedLayerError, layer_names
from kfqn_ext.curvature.products import HessianProduct, OutputGGN, OutputHessian, not_one_tensor
from kfqn_ext.curvature.report import FLOOR, GRADIENT, CurvatureReport, LayerReport
from kfqn_ext.curvature.rungs import Extra, Facts, Rung, extra_rungs, fisher_rungs, held_rungs, paper_rungs
from kfqn_ext.curvature.sums import KroneckerSums, kronecker_sums
from kfqn_ext.curvature.vec import vec
from kfqn_ext.linalg.nearest import kron, nearest_kronecker

# Matrices of the block's size held at a time: the rungs, without the optimizers', and what a comparison works with.
_MATRICES = 16

# Of all layers together, where none is named: minutes for a small net.
_PRODUCTS = 10_000

COUPLED = "One datum's gradient depends on other data (BatchNorm in training mode? a loss that compares data?)."


@measuring()
def curvature_ladder(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layers: Sequence[str | nn.Module] | None = None,
    optimizers: Mapping[str, HoldsInverses] | HoldsInverses | None = None,
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
    outputs and as many Gauss-Newton products (N times as many where data are coupled), and a few eigenvalue problems
    of size p a rung. Above 10,000 products, layers must be named. See :func:`estimate_curvature` for larger ones.

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
        optimizers: Trained optimizers of this model by the name to show, or one; anything with a method
            ``inverses(weight)`` that returns :class:`~kfqn_ext.linalg.Inverses`. λ_A and λ_G are those it names, and
            ``damping`` in ``algo_8``'s split where it names none.
        damping: λ for the directions of all rungs that hold no damping of their own. If None, the first
            optimizer's; without one, a hundredth of the block's largest eigenvalue in absolute value, plus what
            makes the block positive semidefinite.
        extra: Further rungs of a layer, given its name: ``{name: matrix or (A, G)}``.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the matrices of one layer may take, with the G_{t,t} of all data and locations.
        progress: Whether to show progress bars.

    Returns:
        The report; ``print`` it, ``to_dataframe()``, ``plot(path)``.

    Raises:
        ValueError: As :func:`exact_block`; for a damping below 0; if a layer that is named takes no part; and if none
            is named, and all of them take more than 10,000 products.
        UnsupportedLayerError: As :func:`exact_block`.
        MemoryError: If a layer's matrices are larger than the budget.
    """
    named = by_name(optimizers)
    check_numbers(model, damping, dtype)
    problems, notes = used_layers(model, loss_fn, x, y, layers, dtype)
    check_memory(problems, memory_budget, len(named))
    check_products(problems, layers)
    return CurvatureReport([layer_ladder(problem, named, damping, extra, progress) for problem in problems], notes)


def check_numbers(model: nn.Module, damping: float | None, dtype: torch.dtype | None) -> None:
    """Refuse a damping that is none, and dtypes without eigenvalues.

    Raises:
        ValueError: For either.
    """
    if damping is not None and not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping}: λ is a finite number, at least 0. None chooses one.")
    dtypes = {p.dtype for p in model.parameters()} if dtype is None else {dtype}
    low = [str(d) for d in dtypes if d not in (torch.float32, torch.float64)]
    if low:
        raise ValueError(f"{', '.join(low)} has no eigenvalues in torch: choose dtype=torch.float64 or torch.float32.")


def used_layers(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layers: Sequence[str | nn.Module] | None,
    dtype: torch.dtype | None,
) -> tuple[list[LayerLoss], list[str]]:
    """The layers asked for, or all of the model's that take part in its forward pass, and notes on the others.

    Raises:
        ValueError: If there is none, or one that is named takes no part.
    """
    chosen = (
        [layers] if isinstance(layers, (str, nn.Module)) else layer_names(model) if layers is None else list(layers)
    )
    if not chosen:
        found = f"{type(model).__name__} has no linear or convolutional layer that can be measured."
        raise ValueError(found if layers is None else "layers is empty: name a layer, or give None for all.")
    problems, notes = [], []
    for layer in chosen:
        problem = LayerLoss(model, loss_fn, x, y, layer, dtype)
        try:
            problem.by_outputs()
            problems.append(problem)
        except UnusedLayerError as error:
            if layers is not None:
                raise
            notes.append(str(error))
    if not problems:
        raise ValueError(" ".join(notes))
    return problems, notes


def check_memory(problems: Sequence[LayerLoss], memory_budget: int, optimizers: int) -> None:
    """Refuse layers whose ladder is larger than a memory budget.

    Raises:
        MemoryError: If one is.
    """
    for problem in problems:
        outputs = sum(shift.numel() for shift in problem.by_outputs().shifts)
        # The G_{t,t} of the Hessian and of its Gauss-Newton part, N · T · d_out² numbers a group each.
        more = 2 * outputs * problem.geometry.d_out
        check_budget(problem, memory_budget, matrices=_MATRICES + optimizers, more=more)


def check_products(problems: Sequence[LayerLoss], layers: Sequence[str | nn.Module] | None) -> None:
    """Refuse a ladder of hours that nobody asked for by a layer's name.

    Raises:
        ValueError: If no layer is named and all of them take too many products.
    """
    if layers is not None:
        return
    outputs = {problem: sum(shift.numel() for shift in problem.by_outputs().shifts) for problem in problems}
    if 2 * sum(outputs.values()) + sum(p.W.numel() for p in problems) <= _PRODUCTS:
        return
    hessians = ((problem, OutputHessian(problem)) for problem in problems)
    sizes = {problem: (hessian.coupled, hessian.a.shape[0]) for problem, hessian in hessians}
    apart = {problem: problem.W.numel() + 2 * outputs[problem] // N for problem, (_, N) in sizes.items()}
    counts = {p: p.W.numel() + 2 * outputs[p] if coupled else apart[p] for p, (coupled, _) in sizes.items()}
    if sum(counts.values()) <= _PRODUCTS:
        return
    each = ", ".join(f"{problem.name} {count:,}" for problem, count in counts.items())
    way_out = f" {COUPLED} With model.eval(), if that is why, it takes {sum(apart.values()):,}."
    raise ValueError(
        f"The ladder of all layers takes {sum(counts.values()):,} products with second derivatives ({each}), and no "
        f"layer is named: name those that you want, layers=[{problems[0].name!r}], or use estimate_curvature, which "
        f"takes some hundreds a layer.{way_out if any(coupled for coupled, _ in sizes.values()) else ''}"
    )


def by_name(optimizers: Mapping[str, HoldsInverses] | HoldsInverses | None) -> Mapping[str, HoldsInverses]:
    """Name a single optimizer by its class."""
    if optimizers is None:
        return {}
    return optimizers if isinstance(optimizers, Mapping) else {type(optimizers).__name__: optimizers}


def layer_ladder(
    problem: LayerLoss,
    optimizers: Mapping[str, HoldsInverses],
    damping: float | None = None,
    extra: Extra | None = None,
    progress: bool = False,
) -> LayerReport:
    """Build and measure all rungs of one layer; the arguments are those of :func:`curvature_ladder`."""
    hessian, notes = OutputHessian(problem), list[str]()
    if hessian.coupled:
        notes.append(COUPLED)
    sums, gauss_newton = kronecker_sums(hessian, progress), _gauss_newton(problem, hessian, notes, progress)
    Gamma = None if gauss_newton is None else gauss_newton.G_tt.mean((0, 1))
    facts = Facts(gram(hessian.a), sums.G_tt.mean((0, 1)), Gamma, *hessian.a.shape[:2])
    yardstick = Yardstick(*_form_block(problem, progress), facts)
    lam = damping if damping is not None else _default_damping(problem, optimizers, yardstick.spectrum)
    held = list(held_rungs(problem, optimizers, facts, lam))
    notes += [remark for remark in held if isinstance(remark, str)]
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
        *fisher_rungs(gauss_newton, facts),
        *extra_rungs(problem, extra),
        Rung(FLOOR, "", kron(*nearest_kronecker(yardstick.exact, problem.geometry.d_out))),
    ):
        report.add(*yardstick.measure(rung, lam), rung.matrix)
    return report


def _gauss_newton(problem: LayerLoss, hessian: OutputHessian, notes: list[str], progress: bool) -> KroneckerSums | None:
    """The sums of the Gauss-Newton part; ``notes`` is told why there is none, or what is out of the ordinary."""
    if not isinstance(hessian.output, Tensor):
        notes.append(not_one_tensor(hessian.output))
        return None
    sums = kronecker_sums(OutputGGN(problem, hessian), progress)
    if has_negative(torch.linalg.eigvalsh(sums.exact)):
        notes.append(NOT_CONVEX)
    return sums


def _form_block(problem: LayerLoss, progress: bool) -> tuple[Tensor, Tensor]:
    """The exact block [G, p, p] and vec of the gradient [G, p]."""
    product = HessianProduct(problem)
    block, gradient = form(problem, product, progress=progress), vec(product.gradient)
    return (block, gradient) if problem.geometry.blocks else (block.unsqueeze(0), gradient.unsqueeze(0))


def _default_damping(problem: LayerLoss, optimizers: Mapping[str, HoldsInverses], spectrum: Tensor) -> float:
    held = held_damping(optimizers, problem.weight)
    return held if held is not None else default_damping(float(spectrum[0]), float(spectrum[-1]))


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
