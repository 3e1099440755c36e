"""Products with a layer's exact curvature that form nothing: Hessian, generalized Gauss-Newton, output Hessian."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import grad

from kfqn_ext.curvature.problem import LayerLoss, no_graph


class Product(Protocol):
    """A symmetric linear map on matrices [*B, d_out, d_in], diagonal in *B."""

    def __call__(self, V: Tensor) -> Tensor:
        """Map [*B, d_out, d_in] to [*B, d_out, d_in]."""


def pull(outputs: Tensor, inputs: list[Tensor], v: Tensor, create_graph: bool = False) -> list[Tensor]:
    """Vᵀ ∂outputs/∂inputs; zeros where there is no dependence."""
    if not outputs.requires_grad:
        return [torch.zeros_like(i) for i in inputs]
    found = grad(outputs, inputs, v, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(i) if f is None else f for f, i in zip(found, inputs, strict=True)]


def gradient(problem: LayerLoss, loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """∂loss/∂inputs with a graph; zeros for those that the loss does not depend on.

    Raises:
        UnusedLayerError: If it depends on none: a missing graph is no curvature of zero.
    """
    found = grad(loss, inputs, create_graph=True, allow_unused=True)
    if all(f is None for f in found):
        raise no_graph(problem.name)
    return [torch.zeros_like(i) if f is None else f for f, i in zip(found, inputs, strict=True)]


class _Curvature:
    """Runs a full-layer product block by block, so that channel groups do not mix."""

    def __init__(self, problem: LayerLoss) -> None:
        self._blocks = problem.geometry.blocks

    def full(self, V: Tensor) -> Tensor:
        """Multiply with the matrix of all parameters of the layer, channel groups coupled."""
        raise NotImplementedError

    def __call__(self, V: Tensor) -> Tensor:
        """Multiply with the block of each channel group; one product for each group."""
        if not self._blocks:
            return self.full(V)
        result = torch.empty_like(V)
        for b in range(self._blocks[0]):
            only = torch.zeros_like(V)
            only[b] = V[b]
            result[b] = self.full(only)[b]
        return result


class HessianProduct(_Curvature):
    """V ↦ ∂²f/∂vec(W)² V by double backward, in matrix form.

    The graph of one gradient is kept for as long as the object lives: about twice the memory of a backward pass
    that begins at the layer.

    Attributes:
        gradient: ∂f/∂W, [*B, d_out, d_in].
        loss: f.
    """

    def __init__(self, problem: LayerLoss) -> None:
        """Run one forward and one backward pass.

        Raises:
            UnusedLayerError: If the loss has no graph that reaches the layer.
        """
        super().__init__(problem)
        self._W, passed = problem.W, problem.by_weights()
        self.loss = passed.loss.detach()
        (self._g,) = gradient(problem, passed.loss, [self._W])
        self.gradient = self._g.detach()

    def full(self, V: Tensor) -> Tensor:  # noqa: D102
        (result,) = pull(self._g, [self._W], V.to(self._g.dtype))
        return result


class GGNProduct(_Curvature):
    """V ↦ Jᵀ (∂²ℓ/∂z²) J V with J = ∂z/∂vec(W) and z the model's output: the generalized Gauss-Newton matrix."""

    def __init__(self, problem: LayerLoss) -> None:
        """Run one forward pass.

        Raises:
            TypeError: If the model's output is not one tensor.
            UnusedLayerError: If it has no graph that reaches the layer.
        """
        super().__init__(problem)
        z = one_tensor(problem.by_weights().output)
        if not z.requires_grad:
            raise no_graph(problem.name)
        self._product = _GaussNewton(problem, z, [problem.W], lambda parts: parts[0])

    def full(self, V: Tensor) -> Tensor:  # noqa: D102
        return self._product(V)


class _GaussNewton:
    """v ↦ Jᵀ (∂²ℓ/∂z²) J v, J the Jacobian of z by tensors that ``join`` makes one of."""

    def __init__(
        self, problem: LayerLoss, z: Tensor, inputs: list[Tensor], join: Callable[[list[Tensor]], Tensor]
    ) -> None:
        self._z, self._inputs, self._join = z, inputs, join
        self._loss_hessian = loss_hessian(problem, z)
        # J v without forward mode: the gradient by u of <Jᵀu, v>, linear in u.
        self._u = torch.zeros_like(z, requires_grad=True)
        self._JT_u = join(pull(z, inputs, self._u, create_graph=True))

    def __call__(self, v: Tensor) -> Tensor:
        (Jv,) = pull(self._JT_u, [self._u], v.to(self._JT_u.dtype))
        return self._join(pull(self._z, self._inputs, self._loss_hessian(Jv)))


class _LossHessian:
    """v ↦ ∂²ℓ/∂z² v at a model's output z."""

    def __init__(self, problem: LayerLoss, z: Tensor) -> None:
        self._z = z.detach().requires_grad_()
        loss = problem.loss(self._z)
        (self._g,) = pull(loss, [self._z], torch.ones_like(loss), create_graph=True)

    def __call__(self, v: Tensor) -> Tensor:
        (result,) = pull(self._g, [self._z], v)
        return result


def loss_hessian(problem: LayerLoss, z: Tensor) -> _LossHessian:
    """Make the product with the loss's Hessian at an output ``z``."""
    return _LossHessian(problem, z)


def one_tensor(output: object) -> Tensor:
    """Return a model's output where it is a tensor.

    Raises:
        TypeError: If it is not: the Gauss-Newton matrix is defined by it.
    """
    if not isinstance(output, Tensor):
        raise TypeError(not_one_tensor(output))
    return output


def not_one_tensor(output: object) -> str:
    """What to do about a model's output that is no tensor."""
    return (
        f"The model returns a {type(output).__name__}; the Gauss-Newton matrix and the Fisher factor need one "
        "tensor. Wrap the model so that it returns what the loss depends on."
    )


class OutputHessian:
    """Products with the Hessian of f by the layer's outputs, ∂²f/∂h_t(n)∂h_t'(n'); and what goes with it.

    Vectors are [N, T, G, d_out] with G = 1 where there are no channel groups. The calls of a layer that is used
    several times are further locations.

    Attributes:
        a: Patches, [N, T, G, d_in].
        gradient: ∂f/∂h_t(n), [N, T, G, d_out]; N of them are gradients of one datum's loss where f is a mean.
        output: The model's output, with a graph that begins at the layer's outputs.
        coupled: Whether a datum's gradient depends on other data, as with BatchNorm in training mode or a loss that
            compares data.
    """

    def __init__(self, problem: LayerLoss) -> None:
        """Run one forward and one backward pass, and one product to see whether data are coupled.

        Raises:
            ValueError: If the layer took no part, or its calls saw different numbers of data.
        """
        passed, geometry = problem.by_outputs(), problem.geometry
        self.shifts, self._geometry = list(passed.shifts), geometry
        patches = [geometry.patches(geometry.as_batch(x)) for x in passed.inputs]
        if len({a.shape[0] for a in patches}) > 1:
            raise ValueError(f"Layer {problem.name} was called on different numbers of data in one pass.")
        self.a = self._by_group(torch.cat(patches, dim=1))
        self.output = passed.output
        self._g = self.located(gradient(problem, passed.loss, self.shifts))
        self.gradient = self._g.detach()
        self.coupled = couples_data(self, self.gradient)

    def _by_group(self, v: Tensor) -> Tensor:
        return v if self._geometry.blocks else v.unsqueeze(2)

    def located(self, like_outputs: list[Tensor]) -> Tensor:
        """Tensors shaped like the layer's outputs by location, [N, T, G, d_out]."""
        parts = [self._geometry.outputs(self._geometry.as_batch(g)) for g in like_outputs]
        return self._by_group(torch.cat(parts, dim=1))

    def __call__(self, v: Tensor) -> Tensor:
        """Multiply: [N, T, G, d_out] → [N, T, G, d_out]."""
        return self.located(pull(self._g, self.shifts, v))

    def pull_output(self, v: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the model's output z by h with v, shaped like z: [N, T, G, d_out]."""
        return self.located(pull(one_tensor(self.output), self.shifts, v))


class OutputGGN:
    """Products with the Gauss-Newton part of :class:`OutputHessian`, in whose place it can stand: Jᵀ (∂²ℓ/∂z²) J.

    J = ∂z/∂h, z the model's output, of any shape and order. The attributes are those of :class:`OutputHessian`.
    """

    def __init__(self, problem: LayerLoss, hessian: OutputHessian) -> None:
        """Use the graph of the model's output that ``hessian`` holds.

        Raises:
            TypeError: If the model's output is not one tensor.
        """
        self.a, self.gradient = hessian.a, hessian.gradient
        self._product = _GaussNewton(problem, one_tensor(hessian.output), hessian.shifts, hessian.located)
        self.coupled = hessian.coupled or couples_data(self, self.gradient)

    def __call__(self, v: Tensor) -> Tensor:
        """Multiply: [N, T, G, d_out] → [N, T, G, d_out]."""
        return self._product(v)


def couples_data(product: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether a linear map mixes the rows of a tensor [N, ...]: does a push at half of them reach the others?"""
    N = like.shape[0]
    if N < 2:
        return False
    generator = torch.Generator().manual_seed(0)  # the global one is not ours
    v = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like)
    others = torch.randperm(N, generator=generator, device="cpu")[N // 2 :].to(like.device)
    v[others] = 0
    Mv = product(v).abs()
    return bool(Mv[others].max() > 1e3 * torch.finfo(Mv.dtype).eps * Mv.max())
