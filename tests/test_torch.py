"""Behaviour of torch that it does not document and the package relies on; and that it does so in one file alone."""

import ast
import copy
import threading
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfqn_ext
from kfqn_ext import _torch
from kfqn_ext.extensions.elsewhere import _PRODUCTS


def in_backward(ask: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """A leaf, a function of it, and what the answers are whenever a backward pass reaches that function."""
    leaf, answers = torch.ones(3, requires_grad=True), []
    h = 2 * leaf
    h.register_hook(lambda g: answers.append(ask(g, leaf)))
    return leaf, h, answers


# ------------------------------------------------------------------ the backward pass that runs


def test_each_backward_pass_has_its_number() -> None:
    _, h, numbers = in_backward(lambda g, leaf: _torch.current_backward())
    assert _torch.current_backward() == -1
    (h.sum() + h.sin().sum()).backward(retain_graph=True)
    h.sum().backward()
    assert len(set(numbers)) == 2 and min(numbers) >= 0
    assert _torch.current_backward() == -1


def test_a_reentrant_backward_pass_has_its_own_number() -> None:
    forward, backward = [], []

    def block(x: Tensor) -> Tensor:
        forward.append(_torch.current_backward())
        y = x.sin()
        y.register_hook(lambda g: backward.append(_torch.current_backward())) if y.requires_grad else None
        return y

    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=True).sum()
    loss.register_hook(lambda g: backward.append(_torch.current_backward()))
    loss.backward()
    outer, inner = backward
    assert forward == [-1, outer] and inner != outer


def test_whether_a_backward_pass_keeps_its_graph() -> None:
    _, h, kept = in_backward(lambda g, leaf: _torch.keeps_graph())
    h.sum().backward(retain_graph=True)
    h.sum().backward()
    assert kept == [True, False]


def test_where_torch_does_not_tell_the_graph_counts_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert _torch.keeps_graph()


def test_which_gradients_a_backward_pass_computes() -> None:
    leaf, h, answers = in_backward(lambda g, leaf: _torch.computes_gradient_of(leaf))
    other = torch.ones(3, requires_grad=True)
    y = (h * other).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True, inputs=[leaf])
    torch.autograd.grad(y, leaf, retain_graph=True)
    assert answers == [True, True, True]
    del answers[:]
    x = torch.ones(3, requires_grad=True)
    z = leaf * x
    z.register_hook(lambda g: answers.append(_torch.computes_gradient_of(leaf)))
    torch.autograd.grad(z.sum(), x)
    assert answers == [False]


def test_a_tensor_without_gradient_counts_as_computed() -> None:
    _, h, answers = in_backward(lambda g, leaf: _torch.computes_gradient_of(torch.ones(2)))
    h.sum().backward()
    assert answers == [True]


def test_which_gradients_a_backward_pass_adds_to() -> None:
    """Those of leaves, where they are not returned: by backward(), but not by grad(), of the leaf or another tensor."""
    leaf, h, answers = in_backward(lambda g, leaf: _torch.accumulates_gradient_of(leaf))
    other = torch.ones(3, requires_grad=True)
    y = (h * other).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True, inputs=[leaf])
    assert answers == [True, True]
    del answers[:]
    torch.autograd.grad(y, leaf, retain_graph=True)
    torch.autograd.grad(y, h, retain_graph=True)
    y.backward(retain_graph=True, inputs=[h])
    assert answers == [False, False, False]


def test_a_reentrant_backward_pass_adds_to_gradients() -> None:
    leaf, answers = torch.ones(3, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        y = x * leaf
        if y.requires_grad:
            y.register_hook(lambda g: answers.append(_torch.accumulates_gradient_of(leaf)))
        return y

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()
    assert answers == [True]


def test_a_tensor_without_gradient_has_none_added_to() -> None:
    _, h, answers = in_backward(lambda g, leaf: _torch.accumulates_gradient_of(torch.ones(2)))
    h.sum().backward()
    assert answers == [False]


# ------------------------------------------------------------------ its graph


def test_where_a_backward_pass_has_started() -> None:
    _, h, roots = in_backward(lambda g, leaf: _torch.roots_of_backward(0))
    loss, other = h.sum(), h.sin().sum()
    loss.backward(retain_graph=True)
    torch.autograd.backward([loss, other])
    assert roots == [[loss.grad_fn], [loss.grad_fn, other.grad_fn]]
    assert _torch.roots_of_backward(threading.get_ident()) == []


def test_the_innermost_backward_pass_is_the_one_that_runs() -> None:
    found: list[Any] = []

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: found.append((_torch.roots_of_backward(0), y.grad_fn))) if y.requires_grad else None
        return y

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()
    ((roots, node),) = found
    assert roots == [node]


def test_where_a_pass_of_another_thread_has_started() -> None:
    """As hooks on a GPU see it, which run in a thread of torch's."""
    _, h, roots = in_backward(lambda g, leaf: ask(threading.get_ident()))
    loss = h.sum()

    def ask(thread: int) -> list[Any]:
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.extend(_torch.roots_of_backward(thread)))
        other.start()
        other.join()
        return found

    loss.backward()
    assert roots == [[loss.grad_fn]]


def test_nodes_have_makers_and_leaves_and_keep_notes() -> None:
    leaf = torch.ones(2, 2, requires_grad=True)
    product = torch.ones(2, 2) @ leaf
    node = product.grad_fn
    none, accumulating = _torch.inputs_of(node)
    assert none is None and _torch.leaf_of(accumulating) is leaf and _torch.leaf_of(node) is None
    _torch.annotations_of(node)["note"] = accumulating
    total = product.sum()
    del product, node
    assert _torch.annotations_of(_torch.inputs_of(total.grad_fn)[0])["note"] is accumulating


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda W, x: F.linear(x, W), "Mm"),
        (lambda W, x: F.linear(x, W, torch.ones(3)), "Addmm"),
        (lambda W, x: torch.bmm(x[None], W.T[None]), "Bmm"),
        (lambda W, x: W @ x[0], "Mv"),
        (lambda W, x: torch.addmv(torch.ones(3), W, x[0]), "Addmv"),
        (lambda W, x: W[0].dot(x[0]), "Dot"),
        (lambda W, x: torch.baddbmm(torch.ones(1, 2, 3), x[None], W.T[None]), "Baddbmm"),
        (lambda W, x: torch.addbmm(torch.ones(2, 3), x[None], W.T[None]), "Addbmm"),
        (lambda W, x: F.conv1d(x[None], W[:, :2, None]), "Convolution"),
        (lambda W, x: F.embedding(torch.tensor([0]), W), "Embedding"),
        (lambda W, x: F.embedding_bag(torch.tensor([[0]]), W), "EmbeddingBag"),
    ],
)
def test_what_torch_calls_products(make: Any, name: str) -> None:
    W, x = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4)
    assert make(W, x).grad_fn.name() == f"{name}Backward0"
    assert name in _PRODUCTS


# ------------------------------------------------------------------ threads


def test_a_value_of_a_thread_is_that_thread_s_alone() -> None:
    found = []
    _torch.set_of_thread("test", "mine")
    thread = threading.Thread(target=lambda: found.append(_torch.of_thread("test", "nobody's")))
    thread.start()
    thread.join()
    assert (_torch.of_thread("test", "nobody's"), found) == ("mine", ["nobody's"])
    _torch.set_of_thread("test", None)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_sees_the_values_of_the_thread_that_starts_it(device: str, reentrant: bool) -> None:
    """On a GPU it runs in another one, and so does what a checkpoint computes again."""
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(_torch.of_thread("test", "nobody's"))
        h = x.sin()
        if h.requires_grad:
            h.register_hook(lambda g: seen.append(_torch.of_thread("test", "nobody's")))
        return h

    def run(name: str) -> None:
        barrier.wait()
        _torch.set_of_thread("test", name)
        loss = checkpoint(block, torch.ones(3, requires_grad=True, device=device), use_reentrant=reentrant).sum()
        _torch.set_of_thread("test", name + ", changed")
        barrier.wait()
        loss.backward()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("one", "two"):
        assert seen.count(name) == 1 and seen.count(name + ", changed") == 2
    assert len(seen) == 6


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_that_counts_is_seen() -> None:
    """In its function and in the repetition of that; a reentrant one does not count."""
    x, answers = torch.ones(3, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        answers.append(_torch.counts_what_is_saved())
        return x.sin().cos()

    for reentrant in (False, True):
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert answers == [True, True, False, False]
    assert not _torch.counts_what_is_saved()


def test_what_is_saved_is_counted_and_guarded() -> None:
    """As what an operation saves for its backward pass: packed by hooks, and refused once it was written to."""
    x, packed = torch.ones(3), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t * 2):
        assert _torch.save(x).unpack().tolist() == [2, 2, 2]
    assert len(packed) == 1
    saved = _torch.save(x)
    assert saved.unpack().data_ptr() == x.data_ptr()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        saved.unpack()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_can_be_left_out(reentrant: bool) -> None:
    """Then the function runs once, and its parameters have a graph; after an error, too, all is as before."""
    layer, x, runs = nn.Linear(3, 3), torch.ones(2, 3), []

    def block(x: Tensor) -> Tensor:
        runs.append(x)
        return layer(x).tanh()

    def run() -> int:
        runs.clear()
        output = checkpoint(block, x, use_reentrant=reentrant)
        if output.requires_grad:
            torch.autograd.grad(output.sum(), layer.weight)
        return len(runs)

    with pytest.raises(KeyError), _torch.without_checkpoints():
        assert run() == 1
        assert checkpoint(block, x, use_reentrant=reentrant).requires_grad
        raise KeyError
    # A reentrant one has no graph, another repeats the function.
    assert run() == (1 if reentrant else 2)
    assert checkpoint(block, x, use_reentrant=reentrant).requires_grad != reentrant


# ------------------------------------------------------------------ transformations


def test_transforms_are_seen_from_inside() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.is_transformed())
        return x.square().sum()

    x = torch.ones(2, 3)
    f(x), torch.func.grad(f)(x), torch.func.vmap(f)(x), torch.func.jvp(f, (x,), (x,))
    assert seen == [False, True, True, True] and not _torch.is_transformed()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_tracing_is_seen_from_inside() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.is_traced())
        return 2 * x

    f(torch.ones(2)), torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert seen == [False, True] and not _torch.is_traced()


def test_batches_of_gradients_are_seen_from_inside() -> None:
    leaf, h, seen = in_backward(lambda g, leaf: _torch.is_batched(g))
    torch.autograd.grad(h, leaf, torch.ones(3), retain_graph=True)
    torch.autograd.grad(h, leaf, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda v: torch.autograd.grad(h, leaf, v, retain_graph=True)[0])(torch.eye(3))
    assert seen == [False, True, True]


# ------------------------------------------------------------------ tensors


def test_the_base_of_a_view() -> None:
    x = torch.ones(2, 3)
    assert _torch.base_of(x) is None
    assert _torch.base_of(x[0]) is x and _torch.base_of(x[0].view(3, 1)) is x
    assert _torch.base_of(x.clone()[0].clone()) is None


def test_in_place_operations_reach_hooks_on_the_base() -> None:
    """For which the base is watched: a hook on a view that is modified in place never fires."""
    fired = []
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = base.view(6)
    view.register_hook(lambda g: fired.append("view"))
    base.register_hook(lambda g: fired.append("base"))
    view.mul_(3)
    view.sum().backward()
    assert fired == ["base"]


def test_versions_count_what_is_written() -> None:
    """But through ``data``: nobody can see that."""
    p = nn.Parameter(torch.ones(2))
    versions = [_torch.version_of(p)]
    with torch.no_grad():
        p.mul_(2)
    versions.append(_torch.version_of(p))
    p.data.mul_(2)
    versions.append(_torch.version_of(p))
    assert versions == [0, 1, 1]
    with torch.inference_mode():
        assert _torch.version_of(torch.ones(2).mul_(2)) == 0


def test_hooks_on_a_node_see_what_hooks_on_its_tensor_have_made_of_the_gradient() -> None:
    """Whenever these were registered; and a pass that ends at the tensor does not enter the node."""
    leaf, seen = torch.ones(3, requires_grad=True), []
    h = 2 * leaf
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: seen.append(float(gradients[0].sum())))
    h.register_hook(lambda g: 5 * g)
    torch.autograd.grad(h.sum(), h, retain_graph=True)
    assert seen == []
    h.sum().backward()
    assert seen == [15] and leaf.grad is not None and leaf.grad.tolist() == [10, 10, 10]


def test_leaves_of_nested_containers() -> None:
    tree = {"a": (1, [2, None]), "b": 3}
    assert _torch.map_leaves(lambda leaf: (leaf,), tree) == {"a": ((1,), [(2,), (None,)]), "b": (3,)}


def test_what_compiling_calls_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    for compiled in (torch.compile(model), model):
        names = [name for name, _ in compiled.named_parameters()]
        assert any("_orig_mod." in name for name in names)
        assert [_torch.uncompiled_name(name) for name in names] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_mappings_and_dataclasses_are_trees_too() -> None:
    @dataclass(frozen=True)
    class Pair:
        one: Any
        other: Any
        made: Any = field(default=0, init=False)

    t = [torch.tensor(float(i)) for i in range(4)]
    tree = UserDict(a=Pair(t[0], [t[1], "x"]), b=MappingProxyType({"c": t[2]}))
    assert _torch.tensors_in((tree, t[3])) == t
    twice = _torch.map_leaves(lambda leaf: leaf * 2, tree)
    assert isinstance(twice, UserDict) and twice["a"] == Pair(t[0] * 2, [t[1] * 2, "xx"])
    assert twice["b"] == {"c": t[2] * 2} and tree["a"].one is t[0]
    assert _torch.tensors_in(Pair) == [] and _torch.map_leaves(lambda leaf: leaf, Pair) is Pair


# ------------------------------------------------------------------ modules

BATCH_NORMS = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()]
INSTANCE_NORMS = [nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)]
DROPOUTS = [nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]
OTHERS = [nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2)]


def test_kinds_of_modules() -> None:
    modules = [*BATCH_NORMS, *INSTANCE_NORMS, *DROPOUTS, *OTHERS]
    assert [m for m in modules if _torch.is_batch_norm(m)] == BATCH_NORMS
    assert [m for m in modules if _torch.is_batch_or_instance_norm(m)] == BATCH_NORMS + INSTANCE_NORMS
    assert [m for m in modules if _torch.is_dropout(m)] == DROPOUTS
    assert all(hasattr(m, "running_mean") for m in BATCH_NORMS + INSTANCE_NORMS) and all(m.p == 0.5 for m in DROPOUTS)


def test_the_projection_that_attention_does_not_call() -> None:
    attention, called = nn.MultiheadAttention(4, 2), []
    found = [m for m in attention.modules() if _torch.is_attention_projection(m)]
    assert found == [attention.out_proj] and not _torch.is_attention_projection(nn.Linear(4, 4))
    attention.out_proj.register_forward_hook(lambda *_: called.append(1))
    x = torch.rand(3, 2, 4)
    attention(x, x, x)
    assert not called


def test_global_hooks_are_known() -> None:
    assert not _torch.has_global_forward_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert _torch.has_global_forward_hooks()
    handle.remove()
    assert not _torch.has_global_forward_hooks()


def test_a_hook_is_made_the_first() -> None:
    """In the call for which a pre-hook asks for it."""
    layer, order = nn.Linear(2, 2), []
    handle = layer.register_forward_hook(lambda *_: order.append("mine"))
    layer.register_forward_pre_hook(lambda module, args: _torch.run_hook_first(module, handle))
    layer.register_forward_hook(lambda *_: order.append("prepended"), prepend=True)
    layer(torch.ones(1, 2))
    assert order == ["mine", "prepended"]


def test_replicas_are_known_by_a_mark() -> None:
    """``replicate`` itself wants GPUs; what makes each of its copies does not."""
    layer = nn.Linear(2, 2)
    assert _torch.is_replica(layer._replicate_for_data_parallel())
    assert not _torch.is_replica(layer) and not _torch.is_replica(copy.deepcopy(layer))


def test_what_a_compiled_module_was_made_of() -> None:
    layer = nn.Linear(2, 2)
    assert _torch.uncompiled(torch.compile(layer, backend="eager")) is layer and _torch.uncompiled(layer) is layer


# ------------------------------------------------------------------ one file alone


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_divided_as_torch_divides_them(size: int) -> None:
    """Divided tensors themselves are made by several processes, in tests/distributed."""
    for rows in range(1, 12):
        found = _torch.row_counts(rows, size)
        assert len(found) == size and sum(found) == rows
        assert [n for n in found if n > 0] == [len(part) for part in torch.ones(rows).chunk(size)]


def test_a_tensor_of_one_process_is_not_divided() -> None:
    t, model = torch.ones(2), nn.Linear(2, 2)
    assert not _torch.is_divided(t) and not _torch.is_divided(None)
    assert all(f(t) is t for f in (_torch.rows_of, _torch.rows_among_zeros)) and _torch.own_rows(t, t) is t
    assert not _torch.units_of_fsdp2(model)
    _torch.rest(model)


# Names that torch does not document although they do not begin with an underscore, or that are attributes.
ATTRIBUTES = {"_base", "_is_view", "_orig_mod", "_is_replica", "NonDynamicallyQuantizableLinear"}


def is_private(name: str) -> bool:
    # torch documents its _foreach_ functions.
    return name.startswith("_") and not name.startswith("_foreach_")


def undocumented(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a file imports, or reaches through a chain of attributes."""
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch") and "._" in a.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
            roots |= {a.asname or a.name for a in node.names}
            yield from filter(is_private, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                chain, root = [*chain, root.attr], root.value
            if isinstance(root, ast.Name) and root.id in roots:
                yield from filter(is_private, chain)
            yield from ATTRIBUTES.intersection(chain)
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            yield node.value


FILES = sorted(Path(kfqn_ext.__file__).parent.rglob("*.py"))


def test_private_names_of_torch_are_used_in_one_file_alone() -> None:
    found = {path.name: sorted(set(undocumented(ast.parse(path.read_text(encoding="utf-8"))))) for path in FILES}
    assert [name for name, names in found.items() if names] == ["_torch.py"]
    assert len(found["_torch.py"]) > 10


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _NormBase",
        "from torch.utils._pytree import tree_map",
        "from torch import nn as n\nn.modules.x._y",
        "import torch\ntorch._C._f()",
        "h._base",
        "getattr(model, '_orig_mod')",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(undocumented(ast.parse(source)))


def test_the_search_passes_over_what_is_documented() -> None:
    source = "import torch\nfrom torch import nn\ntorch._foreach_add_(a, b)\nself._x\nmodule._parameters\nnn.Linear"
    assert not list(undocumented(ast.parse(source)))
