"""What the package relies on of torch that torch does not document, in one place.

Each function says which behaviour it relies on, and ``tests/test_torch.py`` tests that behaviour: a version of torch
that changes it is noticed there, and met here.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree
from torch.utils import checkpoint as checkpoints
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")

# ------------------------------------------------------------------ the backward pass that runs


def current_backward() -> int:
    """Number of the backward pass that runs in this thread, -1 outside of one.

    No two passes have the same. One that is started inside another, as by a reentrant checkpoint, has its own.
    """
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward pass that runs keeps its graph, as with ``retain_graph=True``.

    True in versions of torch that do not tell.
    """
    ask: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else ask()


def computes_gradient_of(leaf: Tensor) -> bool:
    """Whether the backward pass that runs computes a leaf's gradient: ``autograd.grad(loss, x)`` does for x alone.

    torch answers for leaves whose gradient is accumulated, and raises a RuntimeError where it is returned instead, or
    where the tensor needs none. Both count as computed.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return True


def accumulates_gradient_of(leaf: Tensor) -> bool:
    """Whether the backward pass that runs adds to a leaf's ``.grad``: ``backward()`` does, ``autograd.grad`` does not.

    torch raises a RuntimeError where a gradient is returned, and where the tensor needs none.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return False


# ------------------------------------------------------------------ its graph


def roots_of_backward(thread: int) -> list[Any]:
    """The nodes of the graph from which the backward pass that runs has started; none where it can't be told.

    Hooks on a CPU run within the call of ``torch.autograd.backward``, whose arguments its frame has. Hooks on a GPU run
    in a thread of torch's, while that call waits in another.

    Args:
        thread: Number of that other one.
    """
    for frame in (sys._getframe(), sys._current_frames().get(thread)):
        while frame is not None:
            if frame.f_code is torch.autograd.backward.__code__:
                tensors = frame.f_locals["tensors"]
                given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                return [node for t in given if (node := getattr(t, "grad_fn", getattr(t, "node", None))) is not None]
            frame = frame.f_back
    return []


def inputs_of(node: Any) -> list[Any]:
    """The nodes that have made the inputs of a node of the graph; None for inputs without a gradient."""
    return [one for one, _ in node.next_functions]


def leaf_of(node: Any) -> Tensor | None:
    """The tensor whose gradient a node accumulates; None for other nodes."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def annotations_of(node: Any) -> dict[str, Any]:
    """What users have noted at a node; it lives as long as the graph does."""
    notes: dict[str, Any] = node.metadata
    return notes


# ------------------------------------------------------------------ threads


def of_thread(key: str, default: T) -> T:
    """What :func:`set_of_thread` has set in this thread; in a backward pass, in the thread that started it.

    torch runs backward passes on a GPU in threads of its own, which inherit these values.
    """
    found: T = torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else default
    return found


def set_of_thread(key: str, value: object) -> None:
    """Set a value for this thread, and for the backward passes that it starts from now on."""
    torch._C._stash_obj_in_tls(key, value)


# ------------------------------------------------------------------ transformations


def is_transformed() -> bool:
    """Whether the code that runs is being transformed by ``torch.func`` (grad, vmap, jvp, functionalize)."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` is writing down what runs."""
    return torch._C._is_tracing()


# Whether ``torch.export`` is writing down what runs. Torch tells since 2.7.
is_exported: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """A function that ``torch.compile`` leaves to Python, between two graphs; it imports torch's compiler.

    Args:
        function: The function.
        reason: Why, for the message where there must be one graph; torch takes it since 2.7.
    """
    disable: Any = torch.compiler.disable
    try:
        disabled: Callable[..., Any] = disable(function, reason=reason)
    except TypeError:
        disabled = disable(function)
    return disabled


def is_batched(t: Tensor) -> bool:
    """Whether a tensor stands for many, inside ``torch.func.vmap`` or a backward pass with ``is_grads_batched=True``.

    These are two generations of vmap, with a kind of tensor each.
    """
    return torch._C._functorch.is_batchedtensor(t) or torch._C._functorch.is_legacy_batchedtensor(t)


# ------------------------------------------------------------------ checkpoints


class _Plainly:
    """What takes the place of the function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def counts_what_is_saved() -> bool:
    """Whether somebody may count what autograd saves: a checkpoint does, with hooks on saved tensors.

    True in versions of torch that do not tell.
    """
    ask: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
    return ask(True) is not None


def save(t: Tensor) -> Any:
    """Save a tensor as autograd does: checkpoints count it, and ``unpack()`` raises where it was written to since."""
    return torch._C._autograd._make_saved_tensor(t, is_output=False)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Run the functions of ``torch.utils.checkpoint`` as if they were called: their graphs are kept, nothing repeated.

    A reentrant checkpoint has no graph of its parameters, and any repeats its function with the parameters that the
    model has by then. It is the process's: other threads' checkpoints keep their graphs meanwhile.
    """
    before = {name: getattr(checkpoints, name) for name in ("CheckpointFunction", "_checkpoint_hook")}
    plain = {"CheckpointFunction": _Plainly, "_checkpoint_hook": nullcontext}
    try:
        for name, value in plain.items():
            setattr(checkpoints, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoints, name, value)


# ------------------------------------------------------------------ tensors


def base_of(t: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, as autograd sees it; None where it is no view.

    An operation in place on a view gives its base another node of the graph, and the view as well.
    """
    return t._base if t._is_view() else None


def version_of(t: Tensor) -> int:
    """How often a tensor was written to; 0 for one of ``torch.inference_mode``, which nobody counts.

    What is written through ``t.data`` is not counted either.
    """
    return 0 if t.is_inference() else t._version


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to whatever is none of these, in nested tuples, lists, mappings and dataclasses."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):  # torch knows dictionaries, and not what is like one
            new = {key: map_leaves(function, of_key) for key, of_key in value.items()}
            if isinstance(value, MutableMapping):
                value = copy(value)
                value.update(new)
                return value
            return new
        if is_dataclass(value) and not isinstance(value, type):
            of_fields = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            return replace(value, **{name: map_leaves(function, part) for name, part in of_fields.items()})
        return function(value)

    return _pytree.tree_map(leaf, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses; none of these is made anew."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, f.name) for f in fields(leaf)])
    return found


# ------------------------------------------------------------------ tensors that are divided among processes


_WHOLE = (Tensor, nn.Parameter)


def is_divided(t: Any) -> bool:
    """Whether a tensor is one of ``torch.distributed.tensor``, of which each process holds a part.

    Nobody has one before that module is imported, which takes a second.
    """
    if type(t) in _WHOLE:  # asked of each parameter many times a step
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def rows_of(t: Tensor) -> Tensor:
    """What this process holds of a tensor: its rows of a divided one, all of any other.

    Of a divided tensor it is the same object at each call, and writing to it writes to the tensor.
    """
    rows: Tensor = t._local_tensor if is_divided(t) else t  # type: ignore[attr-defined]
    return rows


def row_counts(rows: int, size: int) -> list[int]:
    """How many rows each of some processes holds of a tensor: as ``torch.chunk`` divides it, and none of the rest."""
    chunk = -(-rows // size)
    return [max(0, min(rows - rank * chunk, chunk)) for rank in range(size)]


def rows_among_zeros(t: Tensor) -> Tensor:
    """A divided tensor whole, with zeros for the rows of others; any other as it is."""
    if not is_divided(t):
        return t
    mesh, own = t.device_mesh, rows_of(t)  # type: ignore[attr-defined]
    first = sum(row_counts(t.shape[0], mesh.size())[: mesh.get_local_rank()])
    whole = own.new_zeros(t.shape)
    whole[first : first + len(own)] = own
    return whole


def own_rows(whole: Tensor, p: Any) -> Tensor:
    """A whole tensor of p's shape, divided as p is, where p is divided."""
    if not is_divided(p) or is_divided(whole):
        return whole
    own = torch.split(whole, row_counts(p.shape[0], p.device_mesh.size()))[p.device_mesh.get_local_rank()].clone()
    kind = sys.modules["torch.distributed.tensor"].DTensor
    divided: Tensor = kind.from_local(own, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    return divided


def units_of_fsdp2(model: nn.Module) -> list[Any]:
    """The modules of a model that ``fully_shard`` was called on, which needs a process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def rest(model: nn.Module) -> None:
    """Give back the weights that FSDP2 has gathered and not let go, as after a forward pass without a backward pass.

    Modules then have the parameters that are divided, which an optimizer holds. Nothing is sent.
    """
    for unit in units_of_fsdp2(model):
        unit.reshard()


def _groups_of_fsdp2(state: Any) -> list[Any]:
    """The groups of parameters of a unit: one, and in later versions of torch several."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def finder_of_gradients(model: nn.Module) -> Callable[[nn.Module], bool]:
    """What tells whether a layer's weight has a gradient, at rest or while FSDP2 has gathered it.

    FSDP2 leaves a gradient with the gathered weight until it is reduced, or beside it where that has another dtype.
    """
    groups = [group for unit in units_of_fsdp2(model) for group in _groups_of_fsdp2(unit._get_fsdp_state())]
    parameters = [p for group in groups for p in group.fsdp_params]
    kept = {p._module_info.module: p for p in parameters if p._module_info.param_name == "weight"}

    def has_gradient(module: Any) -> bool:
        p = kept.get(module)
        if p is None:
            return module.weight.grad is not None
        gathered = getattr(p, "_unsharded_param", None)
        found = p.sharded_param.grad, None if gathered is None else gathered.grad, p.unsharded_accumulated_grad
        return any(grad is not None for grad in found)

    return has_gradient


# ------------------------------------------------------------------ devices


def is_on_host(t: Tensor) -> bool:
    """Whether nobody has to wait for a tensor's numbers."""
    return t.device.type == "cpu"


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has arithmetic for products in bfloat16; a CPU without takes dozens of times as long.

    torch may take oneDNN's product, which a CPU that has the widest registers alone emulates.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    on_x86: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with suppress(AttributeError):  # torch was built without oneDNN
        takes_onednn = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return takes_onednn and (on_x86() or platform.machine().lower() not in ("x86_64", "amd64"))
    return False


# ------------------------------------------------------------------ modules


def has_global_forward_hooks() -> bool:
    """Whether hooks see, and may change, the output of every module before the module's own hooks do."""
    return bool(nn.modules.module._global_forward_hooks)


def run_hook_first(module: nn.Module, handle: RemovableHandle) -> None:
    """Let one of a module's forward hooks run before its others in the call that is about to begin."""
    hooks: Any = module._forward_hooks  # an OrderedDict, which torch declares as a dict
    if handle.id in hooks:  # which somebody may have cleared
        hooks.move_to_end(handle.id, last=False)


def is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is batch normalization of any number of dimensions, synchronized, or derived from it."""
    return isinstance(module, _BatchNorm)


def is_batch_or_instance_norm(module: nn.Module) -> TypeGuard[_NormBase]:
    """Whether a module is batch or instance normalization: what may have running statistics."""
    return isinstance(module, _NormBase)


def is_dropout(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Whether a module is a dropout of any kind, with its probability ``p``."""
    return isinstance(module, _DropoutNd)


def is_attention_projection(module: nn.Module) -> bool:
    """Whether a module is what ``nn.MultiheadAttention`` keeps the weight of its last product in, and never calls."""
    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def is_replica(module: nn.Module) -> bool:
    """Whether a module is one of the copies that ``nn.DataParallel`` makes for a forward pass."""
    return "_is_replica" in module.__dict__


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` made this one of; itself where it did not."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def uncompiled_name(name: str) -> str:
    """What a parameter was called before ``torch.compile`` put its model, or a part of it, into another module."""
    return name.replace("_orig_mod.", "")
