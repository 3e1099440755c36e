"""``extend``: hooks that run BackPACK's extensions and survive networks that modify their outputs in place.

BackPACK attaches full backward hooks, which wrap a module's output in a view; an in-place ReLU or ``+=`` after the
module then raises in the forward pass. Here a forward hook, before all others of the module, registers a hook on the
node of autograd's graph that has made the output: it is called with the gradient that enters the layer, whatever
others make of output and gradient. Inside ``with backpack(ext):`` it makes the same call,
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
    run_hook_first,
    save,
)
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions.active import BACKPACKS, active, has_backpacks_hooks, reaching
from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.calls import CALL, SHARED, Call, objection_to
from kfqn_ext.extensions.elsewhere import mark_as_differentiated, mark_as_own
from kfqn_ext.geometry import is_layer, layer_input, refuse_nested
from kfqn_ext.linalg import full_precision

_HANDLES = "_kfqn_hooks"
_SHOWN = ("output", "input0", CALL, SHARED)
_DATA_PARALLEL = (
    "nn.DataParallel runs copies of the layers, which live for one forward pass: what is measured on them is lost. "
    "Use one device, or one process for each device and reduce the quantities among them."
)
_ANY = torch.zeros(())


def extend(model: nn.Module) -> nn.Module:
    """Make every linear and convolutional layer of a model ready for ``with backpack(...)``.

    Unlike ``backpack.extend`` it changes nothing in what the model computes and allows in-place operations on the
    layers' outputs; only first-order extensions can run. Calling it again attaches what is new and nothing twice.
    Extend before ``torch.compile``; :func:`unextend` before ``torch.jit.script`` and ``fullgraph=True``. Backward
    passes with ``create_graph=True`` are parts of a computation that goes on, and no extension runs in them. Nor does
    one for a call with other weights than the layer's own (``torch.func.functional_call``).

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
        if is_layer(module) and not hasattr(module, _HANDLES):
            watch = module.register_forward_hook(_watch_output, with_kwargs=True, prepend=True)
            object.__setattr__(module, _HANDLES, (watch, module.register_forward_pre_hook(_go_first)))
    return model


def unextend(model: nn.Module) -> nn.Module:
    """Undo :func:`extend`, and BackPACK's own.

    Args:
        model: Any module. It is modified and returned.

    Returns:
        The model.
    """
    for module in model.modules():
        handles: tuple[RemovableHandle, ...] = getattr(module, _HANDLES, ())
        for handle in handles:
            handle.remove()
        if handles:
            object.__delattr__(module, _HANDLES)
        if has_backpacks_hooks(module):
            for hooks in (module._forward_hooks, module._backward_hooks):
                for number in [k for k, hook in hooks.items() if hook in (hook_store_io, hook_run_extensions)]:
                    del hooks[number]
            delattr(module, BACKPACKS)
            memory_cleanup(module)
    return model


@contextmanager
def input_gradients_only(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Run forward-backward passes that reach extended layers but compute no parameter's gradient.

    Parameters are frozen, and a layer whose output would then not need a gradient gets one through a zero that is
    added to its output. No ``.grad`` changes. Below the first of the layers, autograd has nothing to do. Contexts in
    contexts reach the layers of all of them.

    Args:
        model: An extended model.
        layers: The layers that are to be reached; all of the model's where None.

    Yields:
        Nothing.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        with reaching(model.modules() if layers is None else layers):
            yield
    finally:
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
    return [*active().of(module), *(ext for listener in heard if listener is not None for ext in listener(module))]


def _go_first(module: nn.Module, args: Any) -> None:  # call kfqn_ext.unextend(model) before scripting
    """Forward pre-hook: have the output watched before others change it, whenever and however they were registered."""
    if is_exported():
        return
    if not torch.compiler.is_dynamo_compiling():
        go_first(module)
    elif torch.is_grad_enabled():
        from kfqn_ext.extensions.untraced import first

        first(module)


def go_first(module: nn.Module) -> None:
    """Let the hook that watches a layer's output be the first in the call that begins."""
    if _HANDLES in module.__dict__:  # a copy that torch has quantized has the hooks alone
        run_hook_first(module, module.__dict__[_HANDLES][0])


# torch.jit.script can't compile this hook, and its message shows the line at which it gave up.
def _watch_output(module: nn.Module, args: Any, *rest: Any) -> Any:  # call kfqn_ext.unextend(model) before scripting
    """Forward hook: have the active extensions run once the gradient of this output is known."""
    if is_exported():
        return None  # a computation that is written down
    if torch.compiler.is_dynamo_compiling():
        if not torch.is_grad_enabled():
            return None  # nothing to measure
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
    written_down = is_transformed() or is_traced()  # by computations that go on, or for later
    now = active()
    for reader in now.readers:
        reader(module, None if written_down else layer_input(args, kwargs))
    if written_down or not (disable.should_store_io() and torch.is_grad_enabled() and isinstance(output, Tensor)):
        return None
    if is_replica(module):
        raise UnsupportedLayerError(_DATA_PARALLEL)
    zero = now.reached.zero_for(module, output)
    if zero is not None:
        output = output + zero
    if output.requires_grad:
        _register(module, layer_input(args, kwargs), output)
    return None if zero is None else output


def _may_be_measured(module: nn.Module) -> bool:
    """Whether to keep the input, which autograd itself does not keep where the weight is frozen."""
    weight = module._parameters.get("weight")  # not module.weight, which may run a parametrization
    trained = weight is not None and weight.requires_grad
    return trained or module in active().reached.layers or bool(active().of(module))


def _register(module: nn.Module, x: Tensor, output: Tensor) -> None:
    if output.is_nested:
        output.register_hook(lambda g: _check_nested(module))  # type: ignore[no-untyped-call]
        return
    shape, watched, base = output.shape, output, base_of(output)
    if base is not None and base.requires_grad:
        # When a view is modified in place, it gets another node; that of its base stays.
        if base.numel() != output.numel():
            return
        watched = base
    if watched.grad_fn is None:
        return

    measured = _may_be_measured(module)
    if not measured and not counts_what_is_saved():
        return
    # A checkpoint counts what is saved. What it repeats may find other extensions active, and must save as often: where
    # nothing is kept, something small is saved, which dies at once. In the repetition the input may stand for either.
    saved = save(x.detach() if measured or current_backward() >= 0 else _ANY)
    if not measured:
        return
    kept, call, which = [saved], Call(module), watched.output_nr
    notes = mark_as_own(watched.grad_fn, x.grad_fn)

    def run(gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[which]
        if torch.is_grad_enabled():  # with create_graph=True
            mark_as_differentiated(notes)
        elif g is not None and not is_batched(g):  # as they are with is_grads_batched=True
            exts = _active(module)
            if exts:
                _run_extensions(exts, module, call, kept, g.detach().reshape(shape))
        if not keeps_graph():
            # Autograd lets its inputs go one by one as the pass proceeds; the hooks live until the graph is dropped.
            kept.clear()

    # Not on the tensor: its hooks may change the gradient, and those of others come later.
    watched.grad_fn.register_prehook(run)


def _check_nested(module: nn.Module) -> None:
    """Raise where a layer that is to be measured was given a nested tensor; else it is none of our business."""
    wanted = [ext for ext in _active(module) if not isinstance(ext, LayerExtension) or ext.wanted(module)]
    if wanted and not torch.is_grad_enabled():
        refuse_nested(module)


def _run_extensions(exts: Sequence[Any], module: nn.Module, call: Call, kept: list[Any], g: Tensor) -> None:
    """Call the extensions as BackPACK's backward hook does, with the module's input at hand for this call only."""
    before = {name: module.__dict__.pop(name) for name in _SHOWN if name in module.__dict__}
    # First-order extensions read the output's shape alone; the true output may have been overwritten since.
    module.__dict__.update({"output": g, CALL: call, SHARED: {}})
    try:
        own = objection_to(module, False)[0] is None  # an extension of this package says why it passes over another
        wanted = [ext for ext in exts if (ext.wanted(module) if isinstance(ext, LayerExtension) else own)]
        if wanted and own:
            module.__dict__["input0"] = _input(module, kept)
        with full_precision():
            for ext in wanted:
                if ext.expects_backpropagation_quantities():
                    raise NotImplementedError(
                        f"{type(ext).__name__} propagates second-order quantities, which kfqn_ext.extend does not "
                        "support. Use backpack.extend on a model without in-place operations."
                    )
                ext(module, (None,), (g,))
            if active().runs_backpacks(module):
                CTX.get_extension_hook()(module)
    finally:
        for name in _SHOWN:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


def _input(module: nn.Module, kept: list[Any]) -> Tensor:
    if not kept:
        raise RuntimeError(
            f"The input of {module} is gone: an earlier backward pass went through this call. Use retain_graph=True in "
            "that pass."
        )
    try:
        x: Tensor = kept[0].unpack()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"The input of {module} was modified in place after the layer had read it, so that the layer can't be "
            "measured. Write that operation out of place, x = x + layer(x) for x += layer(x)."
        ) from error
    return x
