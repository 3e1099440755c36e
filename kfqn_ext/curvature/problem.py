"""A loss as a function of one layer alone, on a model that is left as it is.

The model runs through ``torch.func.functional_call`` with detached copies of its parameters and buffers, so that
``.grad``, ``requires_grad``, running statistics and training mode are never touched, frozen layers need no special
case, and float64 is a cast of the copies. Random numbers (dropout) are those of the moment the problem was made, in
every pass, and the generators are left where they were.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfqn_ext._torch import map_leaves, uncompiled, without_checkpoints
from kfqn_ext.calling import arguments, explained
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions import has_backpacks_hooks
from kfqn_ext.geometry import LayerGeometry, geometry_of, is_layer, layer_input, refusal

LossFn = Callable[[Any, Any], Tensor]


class UnusedLayerError(ValueError):
    """A layer took no part in the forward pass, or the loss has no graph that reaches it."""


def no_graph(name: str) -> UnusedLayerError:
    """What to raise where a layer's curvature would be zero for all that autograd sees."""
    return UnusedLayerError(
        f"The loss has no graph that reaches layer {name}, so that its curvature can't be seen. Does it take part? "
        "Does the model call it in torch.no_grad(), detach what it returns, or repeat it in the backward pass by code "
        "of its own? (Functions of torch.utils.checkpoint are run without a checkpoint.) Let it keep this graph."
    )


@dataclass(frozen=True)
class Pass:
    """What one forward pass left.

    Attributes:
        loss: The scalar loss.
        output: The model's output.
        inputs: The layer's inputs, one a call; empty unless the pass was :meth:`LayerLoss.by_outputs`.
        shifts: Zeros added to the layer's outputs, one a call, with which the graph begins; likewise.
    """

    loss: Tensor
    output: Any
    inputs: tuple[Tensor, ...] = ()
    shifts: tuple[Tensor, ...] = ()


class LayerLoss:
    """f as a function of one layer's W = [weight, bias], or of that layer's outputs h, on one minibatch.

    Attributes:
        name: The layer's name in the model.
        module: The layer.
        geometry: What it computes.
        weight: Its weight, under which an optimizer keeps state.
        W: Its parameters as a matrix, [*B, d_out, d_in], a leaf that needs a gradient.
        y: The targets, in the working dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        x: Any,
        y: Any,
        layer: str | nn.Module,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take copies of all that a pass needs.

        Args:
            model: Any model, extended or not, with in-place operations or not, in the mode in which it is to run.
            loss_fn: Maps (model output, y) to a scalar, a mean over data.
            x: The model's input, with tensors in tuples, lists, mappings and dataclasses. A tuple or list is several
                inputs, a mapping several by name; a single one of these is given as ``(x,)``.
            y: The targets, likewise.
            layer: A linear or convolutional layer, by its name in the model or itself.
            dtype: Compute in this dtype; the model's own if None. Casts what is floating point in the model, ``x``
                and ``y``, and in ``loss_fn`` where that is a module.

        Raises:
            ValueError: If the model has no such layer, or ``dtype`` is not a floating-point one.
            UnsupportedLayerError: If the layer cannot be measured as ``h_t = W a_t``.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} has no derivatives. Use torch.float64, torch.float32 or None.")
        self.model = uncompiled(model)  # torch.compile has no second derivatives
        self.loss_fn = loss_fn
        self.name, self.module, self.geometry = find_layer(self.model, layer)

        def cast(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            t = t.detach().clone() if t.is_inference() else t.detach()  # autograd cannot save inference tensors
            return t.to(dtype) if dtype and t.is_floating_point() else t

        self._parameters = {name: cast(p) for name, p in self.model.named_parameters()}
        self._buffers = {name: cast(b).clone() for name, b in self.model.named_buffers()}
        held = [loss_fn.named_parameters(), loss_fn.named_buffers()] if isinstance(loss_fn, nn.Module) else []
        self._loss_tensors = {name: cast(t) for tensors in held for name, t in tensors}
        self._x, self.y = map_leaves(cast, x), map_leaves(cast, y)
        parameters: Any = self.module
        self.weight: Tensor = parameters.weight
        bias = None if parameters.bias is None else cast(parameters.bias)
        self.W = self.geometry.matrix(cast(self.weight), bias).requires_grad_()
        self._devices = sorted({p.device.index for p in self._parameters.values() if p.is_cuda})
        self._rng = (torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices])

    def _path(self, parameter: str) -> str:
        return f"{self.name}.{parameter}" if self.name else parameter

    def by_weights(self) -> Pass:
        """Run the model with a graph that begins at :attr:`W`.

        Raises:
            UnusedLayerError: If the loss has none that does.
        """
        loss, output = self._forward(self.W)
        if not loss.requires_grad:
            raise no_graph(self.name)
        return Pass(loss, output)

    def by_outputs(self) -> Pass:
        """Run the model with a graph that begins at the layer's outputs.

        Raises:
            UnusedLayerError: If the layer takes no part in the pass, or the loss has no such graph.
            ValueError: If it feeds itself.
        """
        inputs: list[Tensor] = []
        shifts: list[Tensor] = []

        def shift(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            x = layer_input(args, kwargs)
            if x.requires_grad:
                raise ValueError(
                    f"Layer {self.name} is called again on what depends on its own output, so that its patches are "
                    "functions of W, and thm_4 and all that follows from it do not hold. exact_block does."
                )
            inputs.append(x.detach().clone())
            shifts.append(torch.zeros_like(output, requires_grad=True))
            return output + shifts[-1]

        handle = self.module.register_forward_hook(shift, with_kwargs=True)
        try:
            loss, output = self._forward(self.W.detach())
        finally:
            handle.remove()
        if not inputs:
            raise UnusedLayerError(f"Layer {self.name} took no part in the forward pass, so it has no curvature.")
        if not loss.requires_grad:
            raise no_graph(self.name)
        return Pass(loss, output, tuple(inputs), tuple(shifts))

    def loss(self, output: Any) -> Tensor:
        """The loss of a model's output.

        Raises:
            ValueError: If it is no scalar.
        """
        if isinstance(self.loss_fn, nn.Module):
            loss = functional_call(self.loss_fn, self._loss_tensors, (output, self.y))
        else:
            loss = self.loss_fn(output, self.y)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ValueError(f"The loss has {found}, not that of a scalar. Let loss_fn average over data.")
        return loss

    def _forward(self, W: Tensor) -> tuple[Tensor, Any]:
        weight, bias = self.geometry.columns(W, self.weight.shape)
        tensors = {**self._parameters, **{name: b.clone() for name, b in self._buffers.items()}}
        tensors[self._path("weight")] = weight
        if bias is not None:
            tensors[self._path("bias")] = bias
        x = map_leaves(lambda t: t.clone() if isinstance(t, Tensor) else t, self._x)
        with torch.random.fork_rng(devices=self._devices), self._errors_explained(), without_checkpoints():
            torch.set_rng_state(self._rng[0])
            for device, state in zip(self._devices, self._rng[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            with explained(self.model, x):
                output = functional_call(self.model, tensors, *arguments(x))
            loss = self.loss(output)
        if not loss.isfinite():
            bad = ", ".join(name for name, p in self._parameters.items() if not p.isfinite().all())
            where = f"parameters that are not finite: {bad}" if bad else "all parameters are finite, so look at x and y"
            raise ValueError(f"The loss is {loss.item()}, which has no curvature ({where}).")
        return loss, output

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Explain an error about dtypes where the model is not in its own, and one about hooks that BackPACK put on."""
        try:
            yield
        except RuntimeError as error:
            if "BackwardHookFunction" in str(error) and any(map(has_backpacks_hooks, self.model.modules())):
                raise RuntimeError(
                    "backpack.extend was called on the model, and its hooks allow no operation in place after a layer: "
                    f"call kfqn_ext.unextend(model), which takes them off too. {error}"
                ) from error
            own, now, text = self.weight.dtype, self.W.dtype, str(error).lower()
            if own == now or not any(word in text for word in ("dtype", "scalar type", "double")):
                raise
            raise RuntimeError(
                f"The model was cast from {own} to {now}, and its pass failed: {error}. Tensors that the model or "
                "loss_fn holds outside of parameters and buffers are not cast, as the class weights of a lambda: cast "
                "them there, weight.to(z), pass a loss module (nn.CrossEntropyLoss(weight=...)), or choose dtype=None."
            ) from error


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module, LayerGeometry]:
    """Look a layer up by name or by itself.

    Args:
        model: The model.
        layer: A name as in ``model.named_modules()``, or the module.

    Returns:
        Its name, itself, its geometry.

    Raises:
        ValueError: If it is not in the model.
        UnsupportedLayerError: If it cannot be measured; the message says why.
    """
    modules = dict(model.named_modules())
    names = [name for name, m in modules.items() if (name == layer if isinstance(layer, str) else m is layer)]
    if not names:
        known = ", ".join(name or "''" for name in layer_names(model)) or "none"
        asked = repr(layer) if isinstance(layer, str) else str(layer)
        raise ValueError(f"The model has no layer {asked}. Its linear and convolutional layers are: {known}.")
    name, module = names[0], modules[names[0]]
    geometry, reason = geometry_of(module), refusal(module)
    own = [p for p in module._parameters.values() if p is not None]
    if geometry is not None and any(
        sum(p is q for p in own) for m in modules.values() if m is not module for q in m._parameters.values()
    ):
        reason = "its parameters belong to several modules, and their Hessian block is that of all of them together"
    if geometry is None or reason is not None:
        raise UnsupportedLayerError(
            f"Layer {name or type(module).__name__} cannot be measured: {reason}. "
            f"Choose one of {', '.join(layer_names(model)) or 'no layer of this model'}, or register its kind with "
            "kfqn_ext.geometry.register."
        )
    return name, module, geometry


def layer_names(model: nn.Module) -> list[str]:
    """Names of all layers that can be measured."""
    return [name for name, module in uncompiled(model).named_modules() if is_layer(module) and refusal(module) is None]
