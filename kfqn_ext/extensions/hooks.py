"""``extend``: hooks that run BackPACK's extensions and survive networks that modify their outputs in place.

BackPACK attaches full backward hooks, which wrap a module's output in a view; an in-place ReLU or ``+=`` after the
module then raises in the forward pass. Here a forward hook registers a tensor hook on the output, which autograd
keeps with the tensor's value at that time. Inside ``with backpack(ext):`` it makes the same call,
``ext(module, g_inp, g_out)``, so one extension serves models that were extended either way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from backpack import disable, hook_run_extensions, hook_store_io, memory_cleanup
from backpack.context import CTX
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfqn_ext._torch import (
    base_of,
    counts_what_is_saved,
    current_backward,
    is_batched,
    is_exported,
    is_replica,
    is_traced,
    is_transformed,
    keeps_graph,
)
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.calls import CALL, Call
from kfqn_ext.geometry import is_layer, layer_input
from kfqn_ext.linalg.precision import without_autocast

_HANDLE = "_kfqn_hook"
_BACKPACKS = "_backpack_extend"  # what BackPACK marks modules with
_DATA_PARALLEL = (
    "nn.DataParallel runs copies of the layers, which live for one forward pass: what is measured on them is lost. "
    "Use one device, or one process for each device and reduce the quantities among them."
)
_ANY = torch.zeros((), requires_grad=True)
_input_gradients_only: frozenset[nn.Module] = frozenset()  # layers that are to have an output gradient


def extend(model: nn.Module) -> nn.Module:
    """Make every linear and convolutional layer of a model ready for ``with backpack(...)``.

    Unlike ``backpack.extend`` it changes nothing in what the model computes and allows in-place operations on the
    layers' outputs; only first-order extensions can run. Calling it again attaches what is new and nothing twice.
    Extend before ``torch.compile``; :func:`unextend` before ``torch.jit.script`` and ``fullgraph=True``. Backward
    passes with ``create_graph=True`` are parts of a computation that goes on, and no extension runs in them.

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
            handle = module.register_forward_hook(_watch_output, with_kwargs=True, prepend=True)
            object.__setattr__(module, _HANDLE, handle)
    return model


def unextend(model: nn.Module) -> nn.Module:
    """Undo :func:`extend`, and BackPACK's own.

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
        if has_backpacks_hooks(module):
            for hooks in (module._forward_hooks, module._backward_hooks):
                for number in [k for k, hook in hooks.items() if hook in (hook_store_io, hook_run_extensions)]:
                    del hooks[number]
            delattr(module, _BACKPACKS)
            memory_cleanup(module)
    return model


def has_backpacks_hooks(module: nn.Module) -> bool:
    """Whether ``backpack.extend`` was called on a module, whose own hooks then run the extensions."""
    return bool(module.__dict__.get(_BACKPACKS, False))


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


Listener = Callable[[nn.Module], Sequence[LayerExtension[Any]]]
"""Says, while a layer's gradient arrives, which extensions are to measure it beside those of ``backpack(...)``."""
_listeners: WeakKeyDictionary[nn.Module, list[WeakMethod[Listener]]] = WeakKeyDictionary()


def listen(modules: Iterable[nn.Module], listener: Listener) -> None:
    """Ask a bound method, in every backward pass, by which extensions layers are to be measured.

    It is held weakly: when its object is gone, nothing asks it any more.

    Args:
        modules: Extended layers.
        listener: The method.
    """
    for module in modules:
        known = _listeners.setdefault(module, [])
        known[:] = [other for other in known if other() not in (None, listener)]
        known.append(WeakMethod(listener))


def _active(module: nn.Module) -> list[Any]:
    """All extensions that are to run for a layer now."""
    heard = [listener() for listener in _listeners.get(module, ())]
    return [*CTX.get_active_exts(), *(ext for listener in heard if listener is not None for ext in listener(module))]


class _Kept(torch.autograd.Function):
    """A node that saves a tensor as autograd does: counted by checkpoints, and guarded against changes in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, any_leaf: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        return any_leaf.clone()


# torch.jit.script can't compile this hook, and its message shows the line at which it gave up.
def _watch_output(module: nn.Module, args: Any, *rest: Any) -> Any:  # call kfqn_ext.unextend(model) before scripting
    """Forward hook: have the active extensions run once the gradient of this output is known."""
    if not torch.is_grad_enabled() or is_exported():
        return None  # nothing to measure; and a computation that is written down
    if torch.compiler.is_dynamo_compiling():
        from kfqn_ext.extensions.untraced import watch  # with torch's compiler, which takes a second to import

        return watch(module, args, *rest)
    return watch_output(module, args, *rest)


def watch_output(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Tensor | None:
    """Look at one call of a layer, after its forward pass.

    Args:
        module: The layer.
        args: What it was called with.
        rest: Its keyword arguments, which a hook that torch has moved to a quantized layer is not given; its output.

    Returns:
        What is to take the place of its output, if anything is.
    """
    kwargs, output = rest if len(rest) == 2 else ({}, *rest)
    if not (disable.should_store_io() and isinstance(output, Tensor)):
        return None
    if is_transformed() or is_traced():
        return None  # computations that go on, and one that is written down
    if has_backpacks_hooks(module):
        return None  # which serve this module
    if is_replica(module):
        raise UnsupportedLayerError(_DATA_PARALLEL)
    replaced = module in _input_gradients_only and not output.requires_grad
    if replaced:
        output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
    if output.requires_grad:
        _register(module, layer_input(args, kwargs), output)
    return output if replaced else None


def _may_be_measured(module: nn.Module) -> bool:
    """Whether to keep the input, which autograd itself does not keep where the weight is frozen."""
    weight = module._parameters.get("weight")  # not module.weight, which may run a parametrization
    trained = weight is not None and weight.requires_grad
    return trained or module in _input_gradients_only or bool(CTX.get_active_exts())


def _register(module: nn.Module, x: Tensor, output: Tensor) -> None:
    shape, watched, base = output.shape, output, base_of(output)
    if base is not None and base.requires_grad:
        # When a view is modified in place, a hook on it never fires; a hook on its base does.
        if base.numel() != output.numel():
            return
        watched = base

    measured = _may_be_measured(module)
    if not measured and not counts_what_is_saved():
        return
    # A checkpoint counts what is saved. What it repeats may find other extensions active, and must save as often: where
    # nothing is kept, something small is saved, which dies at once. In the repetition the input may stand for either.
    node = _Kept.apply(x.detach() if measured or current_backward() >= 0 else _ANY.detach(), _ANY).grad_fn
    if not measured:
        return
    kept, call = [node], Call()

    def run(g: Tensor) -> None:
        # Gradients are enabled with create_graph=True, and batched with is_grads_batched=True.
        if not torch.is_grad_enabled() and not is_batched(g):
            active = _active(module)
            if active:
                _run_extensions(active, module, call, kept, g.detach().reshape(shape))
        if not keeps_graph():
            # Autograd lets its inputs go one by one as the pass proceeds; the hooks live until the graph is dropped.
            kept.clear()

    watched.register_hook(run)  # type: ignore[no-untyped-call]


def _run_extensions(active: Sequence[Any], module: nn.Module, call: Call, kept: list[Any], g: Tensor) -> None:
    """Call the extensions as BackPACK's backward hook does, with the module's input at hand for this call only."""
    wanted = [ext for ext in active if not isinstance(ext, LayerExtension) or ext.wanted(module)]
    # First-order extensions read the output's shape alone; the true output may have been overwritten since.
    own = {"output": g, CALL: call} | ({"input0": _input(module, kept)} if wanted else {})
    before = {name: module.__dict__[name] for name in own if name in module.__dict__}
    module.__dict__.update(own)
    try:
        with without_autocast():
            for ext in wanted:
                if ext.expects_backpropagation_quantities():
                    raise NotImplementedError(
                        f"{type(ext).__name__} propagates second-order quantities, which kfqn_ext.extend does not "
                        "support. Use backpack.extend on a model without in-place operations."
                    )
                ext(module, (None,), (g,))
            CTX.get_extension_hook()(module)
    finally:
        for name in own:
            del module.__dict__[name]
        module.__dict__.update(before)


def _input(module: nn.Module, kept: list[Any]) -> Tensor:
    if not kept:
        raise RuntimeError(
            f"The input of {module} is gone: an earlier backward pass stopped at its output. Use retain_graph=True in "
            "that pass."
        )
    try:
        x: Tensor = kept[0].saved_tensors[0]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"The input of {module} was modified in place after the layer had read it, so that the layer can't be "
            "measured. Write that operation out of place, x = x + layer(x) for x += layer(x)."
        ) from error
    return x
