"""``extend``: hooks that run BackPACK's extensions and survive networks that modify their outputs in place.

BackPACK attaches full backward hooks, which wrap a module's output in a view; an in-place ReLU or ``+=`` after the
module then raises in the forward pass. Here a forward hook registers a tensor hook on the output, which autograd
keeps with the tensor's value at that time. Inside ``with backpack(ext):`` it makes the same call,
``ext(module, g_inp, g_out)``, so one extension serves models that were extended either way.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from backpack import disable
from backpack.context import CTX
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.geometry import is_layer
from kfqn_ext.linalg.precision import without_autocast

_HANDLE = "_kfqn_hook"
_DATA_PARALLEL = (
    "nn.DataParallel runs copies of the layers, which live for one forward pass: what is measured on them is lost. "
    "Use one device, or one process for each device and reduce the quantities among them."
)
_input_gradients_only: frozenset[nn.Module] = frozenset()  # layers that are to have an output gradient
# Not in the oldest versions of torch: there, inputs live as long as the graph.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def extend(model: nn.Module) -> nn.Module:
    """Make every linear and convolutional layer of a model ready for ``with backpack(...)``.

    Unlike ``backpack.extend`` it changes nothing in what the model computes and allows in-place operations on the
    layers' outputs; only first-order extensions can run. Calling it again attaches what is new and nothing twice.
    Extend before ``torch.compile``. Backward passes with ``create_graph=True`` are parts of a computation that goes on,
    and no extension runs in them.

    Args:
        model: Any module. It is modified and returned.

    Returns:
        The model.

    Raises:
        UnsupportedLayerError: If the model is or holds an ``nn.DataParallel``.
    """
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UnsupportedLayerError(_DATA_PARALLEL)
        if is_layer(module) and not hasattr(module, _HANDLE):
            handle = module.register_forward_hook(_watch_output, with_kwargs=True)
            object.__setattr__(module, _HANDLE, handle)
    return model


def unextend(model: nn.Module) -> nn.Module:
    """Undo :func:`extend`.

    Args:
        model: Any module. It is modified and returned.

    Returns:
        The model.
    """
    for module in model.modules():
        handle: RemovableHandle | None = getattr(module, _HANDLE, None)
        if handle is not None:
            handle.remove()
            object.__delattr__(module, _HANDLE)
    return model


@contextmanager
def input_gradients_only(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Run forward-backward passes that reach extended layers but compute no parameter's gradient.

    Parameters are frozen, and a layer whose output would then not need a gradient gets one through a zero that is
    added to its output. No ``.grad`` changes. Below the first of the layers, autograd has nothing to do.

    Args:
        model: An extended model.
        layers: The layers that are to be reached; all of the model's where None.

    Yields:
        Nothing.
    """
    global _input_gradients_only
    trained = [p for p in model.parameters() if p.requires_grad]
    before = _input_gradients_only
    try:
        _input_gradients_only = frozenset(model.modules() if layers is None else layers)
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        _input_gradients_only = before
        for p in trained:
            p.requires_grad_(True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph break, where a traced hook would vanish without a word
def _watch_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
    """Forward hook: have the active extensions run once the gradient of this output is known."""
    if not (disable.should_store_io() and torch.is_grad_enabled() and isinstance(output, Tensor)):
        return None
    if module.__dict__.get("_backpack_extend", False):
        return None  # BackPACK's own hook serves this module
    if "_is_replica" in module.__dict__:
        raise UnsupportedLayerError(_DATA_PARALLEL)
    replaced = module in _input_gradients_only and not output.requires_grad
    if replaced:
        output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
    if output.requires_grad:
        _register(module, (args[0] if args else kwargs["input"]).detach(), output)
    return output if replaced else None


def _register(module: nn.Module, x: Tensor, output: Tensor) -> None:
    shape, watched = output.shape, output
    if output._is_view() and output._base is not None and output._base.requires_grad:
        # When a view is modified in place, a hook on it never fires; a hook on its base does.
        if output._base.numel() != output.numel():
            return
        watched = output._base

    inputs = [x]

    def run(g: Tensor) -> None:
        if CTX.get_active_exts() and not torch.is_grad_enabled():  # enabled: with create_graph=True
            if not inputs:
                raise RuntimeError(
                    f"The input of {module} is gone: an earlier backward pass stopped at its output. Use "
                    "retain_graph=True in that pass."
                )
            _run_extensions(module, inputs[0], g.detach().reshape(shape))
        if not _keeps_graph():
            # Autograd lets its inputs go one by one as the pass proceeds; the hooks live until the graph is dropped.
            inputs.clear()

    watched.register_hook(run)  # type: ignore[no-untyped-call]


def _run_extensions(module: nn.Module, x: Tensor, g: Tensor) -> None:
    """Call the extensions as BackPACK's backward hook does, with the module's input at hand for this call only."""
    # First-order extensions read the output's shape alone; the true output may have been overwritten since.
    object.__setattr__(module, "input0", x)
    object.__setattr__(module, "output", g)
    try:
        with without_autocast():
            for ext in CTX.get_active_exts():
                if ext.expects_backpropagation_quantities():
                    raise NotImplementedError(
                        f"{type(ext).__name__} propagates second-order quantities, which kfqn_ext.extend does not "
                        "support. Use backpack.extend on a model without in-place operations."
                    )
                ext(module, (None,), (g,))
            CTX.get_extension_hook()(module)
    finally:
        object.__delattr__(module, "input0")
        object.__delattr__(module, "output")
