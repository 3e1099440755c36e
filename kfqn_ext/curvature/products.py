"""Products with a layer's exact curvature that form nothing: Hessian, generalized Gauss-Newton, output Hessian."""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import grad

from kfqn_ext.curvature.problem import LayerLoss


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
        """Run one forward and one backward pass."""
        super().__init__(problem)
        self._W, passed = problem.W, problem.by_weights()
        self.loss = passed.loss.detach()
        (self._g,) = pull(passed.loss, [self._W], torch.ones_like(passed.loss), create_graph=True)
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
        """
        super().__init__(problem)
        self._W, self._z = problem.W, one_tensor(problem.by_weights().output)
        self._loss_hessian = loss_hessian(problem, self._z)
        # J v without forward mode: the gradient by u of <Jᵀu, v>, linear in u.
        self._u = torch.zeros_like(self._z, requires_grad=True)
        (self._JT_u,) = pull(self._z, [self._W], self._u, create_graph=True)

    def full(self, V: Tensor) -> Tensor:  # noqa: D102
        (Jv,) = pull(self._JT_u, [self._u], V.to(self._JT_u.dtype))
        (result,) = pull(self._z, [self._W], self._loss_hessian(Jv))
        return result


class _LossHessian:
    """v ↦ ∂²ℓ/∂z² v at a model's output z."""

    def __init__(self, problem: LayerLoss, z: Tensor) -> None:
        self._z = z.detach().requires_grad_()
        with torch.enable_grad():
            loss = problem.loss_fn(self._z, problem.y)
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
        raise TypeError(
            f"The model returns a {type(output).__name__}; the Gauss-Newton matrix and the Fisher factor need one "
            "tensor. Wrap the model so that it returns what the loss depends on."
        )
    return output


class OutputHessian:
    """Products with the Hessian of f by the layer's outputs, ∂²f/∂h_t(n)∂h_t'(n'); and what goes with it.

    Vectors are [N, T, G, d_out] with G = 1 where there are no channel groups. The calls of a layer that is used
    several times are further locations.

    Attributes:
        a: Patches, [N, T, G, d_in].
        gradient: ∂f/∂h_t(n), [N, T, G, d_out]; N of them are gradients of one datum's loss where f is a mean.
        output: The model's output, with a graph that begins at the layer's outputs.
        coupled: Whether a datum's gradient depends on other data, as with BatchNorm in training mode.
    """

    def __init__(self, problem: LayerLoss) -> None:
        """Run one forward and one backward pass, and one product to see whether data are coupled.

        Raises:
            ValueError: If the layer took no part, or its calls saw different numbers of data.
        """
        passed, geometry = problem.by_outputs(), problem.geometry
        self._shifts, self._geometry = list(passed.shifts), geometry
        patches = [geometry.patches(geometry.as_batch(x)) for x in passed.inputs]
        if len({a.shape[0] for a in patches}) > 1:
            raise ValueError(f"Layer {problem.name} was called on different numbers of data in one pass.")
        self.a = self._by_group(torch.cat(patches, dim=1))
        self.output = passed.output
        grads = pull(passed.loss, self._shifts, torch.ones_like(passed.loss), create_graph=True)
        self._g = self.located(grads)
        self.gradient = self._g.detach()
        self.coupled = self._data_are_coupled()

    def _by_group(self, v: Tensor) -> Tensor:
        return v if self._geometry.blocks else v.unsqueeze(2)

    def located(self, like_outputs: list[Tensor]) -> Tensor:
        """Tensors shaped like the layer's outputs by location, [N, T, G, d_out]."""
        parts = [self._geometry.outputs(self._geometry.as_batch(g)) for g in like_outputs]
        return self._by_group(torch.cat(parts, dim=1))

    def __call__(self, v: Tensor) -> Tensor:
        """Multiply: [N, T, G, d_out] → [N, T, G, d_out]."""
        return self.located(pull(self._g, self._shifts, v))

    def pull_output(self, v: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the model's output z by h with v, shaped like z: [N, T, G, d_out]."""
        return self.located(pull(one_tensor(self.output), self._shifts, v))

    def _data_are_coupled(self) -> bool:
        N = self._g.shape[0]
        if N < 2:
            return False
        # Does a push at half of the data, drawn at random, reach the others? (The global generator is not ours.)
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(self._g.shape, generator=generator, dtype=torch.float32, device="cpu").to(self._g)
        others = torch.randperm(N, generator=generator, device="cpu")[N // 2 :].to(self._g.device)
        v[others] = 0
        Hv = self(v).abs()
        return bool(Hv[others].max() > 1e3 * torch.finfo(Hv.dtype).eps * Hv.max())
