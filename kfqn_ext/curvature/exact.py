"""A layer's exact curvature, formed: its Hessian block, its Gauss-Newton block, and the G_{t,t'} of ``thm_4``."""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kfqn_ext.curvature.entry import measuring
from kfqn_ext.curvature.problem import LayerLoss, LossFn
from kfqn_ext.curvature.products import GGNProduct, HessianProduct, OutputHessian
from kfqn_ext.curvature.vec import check_order, torch_vec, vec

MEMORY_BUDGET = 2**30


@measuring()
def exact_block(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layer: str | nn.Module,
    *,
    order: str = "paper",
    dtype: torch.dtype | None = torch.float64,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Tensor:
    """Form a layer's exact Hessian block ∂²f/∂vec(W)² by double backward, one row at a time.

    The model may be extended, contain in-place operations, and be in training or evaluation mode: BatchNorm uses the
    batch's statistics in training mode, and f is then one function of the whole minibatch. Gradients, running
    statistics, random number generators, ``requires_grad`` and the mode stay as they are. Call it outside
    ``with backpack(...)``: active extensions would measure its backward passes.

    Example:
        >>> import torch
        >>> from kfqn_ext.curvature import exact_block
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.rand(8, 3), torch.arange(8) % 2
        >>> exact_block(model, torch.nn.functional.cross_entropy, x, y, layer="0").shape
        torch.Size([16, 16])

    Args:
        model: The model; it is left untouched.
        loss_fn: Maps (model output, y) to a scalar f. A module's parameters and buffers are cast with the model's.
        x: The model's input; a tuple or list is several, ``model(*x)``, and a mapping several by name, ``model(**x)``.
        y: The targets.
        layer: A linear or convolutional layer, by its name in the model or itself; frozen or not.
        order: "paper": columns of W = [weight, bias] stacked, [*B, p, p] with p = d_in · d_out, which for G > 1
            channel groups is one block a group. "torch": all of ``weight.flatten()``, then ``bias``, [P, P], cross
            terms of groups included.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the matrix may take.
        progress: Whether to show a progress bar.

    Returns:
        The block; symmetric up to rounding.

    Raises:
        ValueError: If the model has no such layer, the loss is no finite scalar or has no graph that reaches the layer,
            or ``order`` is unknown.
        UnsupportedLayerError: If the layer cannot be measured as ``h_t = W a_t``.
        MemoryError: If the matrix is larger than the budget; :func:`estimate_curvature` forms none.
    """
    check_order(order)
    problem = LayerLoss(model, loss_fn, x, y, layer, dtype)
    check_budget(problem, memory_budget, order)
    return form(problem, HessianProduct(problem), order, progress)


@measuring()
def exact_ggn_block(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layer: str | nn.Module,
    *,
    order: str = "paper",
    dtype: torch.dtype | None = torch.float64,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Tensor:
    """Form a layer's generalized Gauss-Newton block Jᵀ (∂²ℓ/∂z²) J, z the model's output.

    Equal to the Hessian block where z depends on the layer's W linearly, piecewise linear networks included; and to
    the Fisher block for a loss that is the negative log-likelihood of an exponential family.

    Args:
        model: The model; it is left untouched, see :func:`exact_block`.
        loss_fn: Maps (model output, y) to a scalar.
        x: The model's input.
        y: The targets.
        layer: The layer, by name or itself.
        order: "paper" or "torch".
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the matrix may take.
        progress: Whether to show a progress bar.

    Returns:
        The block, as :func:`exact_block`.

    Raises:
        TypeError: If the model's output is not one tensor.
        ValueError: As :func:`exact_block`.
        UnsupportedLayerError: As :func:`exact_block`.
        MemoryError: As :func:`exact_block`.
    """
    check_order(order)
    problem = LayerLoss(model, loss_fn, x, y, layer, dtype)
    check_budget(problem, memory_budget, order)
    return form(problem, GGNProduct(problem), order, progress)


@measuring()
def exact_output_hessians(
    model: nn.Module,
    loss_fn: LossFn,
    x: Any,
    y: Any,
    layer: str | nn.Module,
    *,
    dtype: torch.dtype | None = torch.float64,
    memory_budget: int = MEMORY_BUDGET,
) -> Tensor:
    """Form all G_{t,t'}(n) = ∂²f(n)/∂h_t(n)∂h_t'(n) of ``thm_4``, one datum's loss f(n) at a time.

    Args:
        model: The model; it is left untouched, see :func:`exact_block`.
        loss_fn: Maps (model output, y) to a scalar, a mean over data.
        x: The model's input.
        y: The targets.
        layer: The layer, by name or itself.
        dtype: Dtype to compute in; None for the model's own.
        memory_budget: Bytes that the result may take.

    Returns:
        [N, T, T, *B, d_out, d_out]; entry (n, t, t') is G_{t,t'}(n).

    Raises:
        ValueError: As :func:`exact_block`; and if a datum's loss depends on other data.
        UnsupportedLayerError: As :func:`exact_block`.
        MemoryError: If the result is larger than the budget.
    """
    problem = LayerLoss(model, loss_fn, x, y, layer, dtype)
    hessian = OutputHessian(problem)
    if hessian.coupled:
        raise ValueError(
            "The gradient of one datum's loss depends on other data (BatchNorm in training mode?), so that there is "
            "no f(n). Use model.eval(), or pass one datum."
        )
    N, T, blocks, d = hessian.gradient.shape
    G = hessian.gradient.new_zeros(0)
    _refuse_if_larger(
        f"The G_{{t,t'}} of layer {problem.name}", N * T * T * blocks * d * d * G.element_size(), memory_budget
    )
    G = hessian.gradient.new_empty(N, T, T, blocks, d, d)
    for t, b, i in product(range(T), range(blocks), range(d)):
        v = torch.zeros_like(hessian.gradient)
        v[:, t, b, i] = N  # f is a mean: N ∂²f/∂h² is one datum's
        G[:, t, :, b, i] = hessian(v)[:, :, b]
    return G if problem.geometry.blocks else G.squeeze(3)


def form(
    problem: LayerLoss, curvature: HessianProduct | GGNProduct, order: str = "paper", progress: bool = False
) -> Tensor:
    """Form the matrix of a product, one row for each parameter; arguments and result as :func:`exact_block`."""
    W = problem.W
    flat = problem.geometry.groups * problem.geometry.d_in * problem.geometry.d_out
    p = problem.geometry.d_in * problem.geometry.d_out
    matrix = W.new_empty(*problem.geometry.blocks, p, p) if order == "paper" else W.new_empty(flat, flat)
    unit = torch.zeros_like(W)
    # The unit matrices in the order of the rows they give: position k of `index` is where in W the k-th row's 1 is.
    places = torch.arange(flat, device=W.device).reshape(W.shape)
    index = vec(places) if order == "paper" else torch_vec(problem.geometry, places, problem.weight.shape)
    for k, place in enumerate(tqdm(index.flatten().tolist(), desc=problem.name, disable=not progress, leave=False)):
        unit.view(-1)[place] = 1
        row = curvature.full(unit)
        unit.view(-1)[place] = 0
        if order == "torch":
            matrix[k] = torch_vec(problem.geometry, row, problem.weight.shape)
        elif problem.geometry.blocks:
            matrix[k // p, k % p] = vec(row)[k // p]
        else:
            matrix[k] = vec(row)
    return matrix


def check_budget(
    problem: LayerLoss, memory_budget: int, order: str = "paper", matrices: int = 1, more: int = 0
) -> None:
    """Refuse to form matrices of a layer's size beyond a memory budget.

    Args:
        problem: The layer.
        memory_budget: Bytes.
        order: As :func:`exact_block`.
        matrices: How many of them are held at a time.
        more: Numbers held beside them.

    Raises:
        MemoryError: If they are larger.
    """
    geometry = problem.geometry
    p = geometry.d_in * geometry.d_out
    entries = geometry.groups * p**2 if order == "paper" else (geometry.groups * p) ** 2
    what = f"The Hessian block of layer {problem.name} ({geometry.groups * p} parameters"
    what += f", {matrices} matrices of its size" if matrices > 1 else ""
    what += f" and {more} numbers for the Hessian by its outputs)" if more else ")"
    _refuse_if_larger(what, (matrices * entries + more) * problem.W.element_size(), memory_budget)


def _refuse_if_larger(what: str, size: int, budget: int) -> None:
    if size > budget:
        raise MemoryError(
            f"{what} takes {mebibytes(size)}, and memory_budget is {mebibytes(budget)}. Use "
            "kfqn_ext.curvature.estimate_curvature, which forms no such matrix, or raise memory_budget, or choose "
            "dtype=torch.float32."
        )


def mebibytes(size: int) -> str:
    """A number of bytes in MiB, to three digits."""
    return f"{size / 2**20:,.0f} MiB" if size >= 100 * 2**20 else f"{size / 2**20:.3g} MiB"
