"""Weights that a backward pass finds multiplied outside of their layers too, as F.linear(x, layer.weight) does.

Autograd adds the parts of a gradient up before it shows them to anybody. Where they come from the graph tells, from the
tensors whose backward pass it is. A product with data counts. A penalty is a function of parameters alone, and doesn't.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from kfqn_ext._torch import annotations_of, current_backward, inputs_of, leaf_of, roots_of_backward

_ENTRY = "kfqn_ext.extensions.elsewhere"
_DIFFERENTIATED = f"{_ENTRY}.differentiated"
# How many of a product's first inputs it multiplies, and how many of its last ones; the rest is added.
_PRODUCTS = {
    **dict.fromkeys(("Mm", "Bmm", "Mv", "Dot", "Linear", "Convolution"), (2, 0)),
    **dict.fromkeys(("Addmm", "Addbmm", "Baddbmm", "Addmv"), (0, 2)),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), (1, 0)),  # with rows of the identity, which are no inputs
}
_LOOKUPS = ("Embedding", "EmbeddingBag")
_OF_VECTORS = ("Mv", "Dot", "Addmv")  # a constant one is a penalty's, as in a power iteration, and no minibatch
_marked_kinds: set[str] = set()  # names of nodes that were ever marked: others need not be asked
_Below = frozenset[Any] | None  # the parameters that a node's output is a function of; None where it depends on data


def mark_as_own(output: Any, entry: Any) -> dict[str, Any]:
    """Mark the node of a layer's output, so that the products of this call are known as its own.

    Args:
        output: The node that has made the output.
        entry: The node that has made the input, where there is one: what is before it is not the layer's.

    Returns:
        What is noted at the node, for :func:`mark_as_differentiated`.
    """
    _marked_kinds.add(output.name())
    notes = annotations_of(output)
    notes[_ENTRY] = entry
    return notes


def mark_as_differentiated(notes: dict[str, Any]) -> None:
    """Note that the gradient of a call has become part of a computation that goes on, by ``create_graph=True``."""
    notes[_DIFFERENTIATED] = True


def is_used_elsewhere(weight: nn.Parameter, thread: int) -> bool:
    """Whether the backward pass that runs adds to a weight's gradient what another product than its layer's gave.

    False where the graph does not tell: it was started in an unknown way, or it differentiates gradients.

    Args:
        weight: The weight.
        thread: Number of the thread that may have started the pass, where this one has not.
    """
    return id(weight) in _found(current_backward(), thread)


@lru_cache(maxsize=8)
def _found(backward: int, thread: int) -> frozenset[int]:
    """All such weights of a pass, by identity: the graph is looked at once."""
    return frozenset(id(p) for p in multiplied_elsewhere(roots_of_backward(thread)))


def multiplied_elsewhere(roots: Iterable[Any]) -> set[nn.Parameter]:
    """The parameters that a graph multiplies with data outside of the calls of layers.

    Args:
        roots: The nodes that it ends in.
    """
    graph = _graph(roots)
    names = {node: node.name() for node in graph}
    notes = {node: annotations_of(node) for node, name in names.items() if name in _marked_kinds}
    is_derived = any(_DIFFERENTIATED in noted for noted in notes.values())
    if is_derived or any(name.count("Backward") > 1 for name in names.values()):
        return set()  # it holds derivatives of products, which are neither of a layer nor of a penalty
    entries = {node: noted.get(_ENTRY, node) for node, noted in notes.items()}
    entries = {node: entry for node, entry in entries.items() if entry is not node}
    own = _own_nodes(graph, entries)
    below: dict[Any, _Below] = {None: frozenset()}
    found: set[nn.Parameter] = set()
    for node, makers in graph.items():
        leaf, inputs = None if makers else leaf_of(node), [below[one] for one in makers]
        weights, with_data = _product(names[node], inputs)
        if leaf is not None:
            below[node] = frozenset((leaf,)) if isinstance(leaf, nn.Parameter) else None
        elif node in entries or with_data or None in inputs:
            below[node] = None
        else:
            below[node] = _union(inputs)
        if with_data and node not in own:
            found |= weights
    return found


def _product(name: str, inputs: list[_Below]) -> tuple[frozenset[Any], bool]:
    """The parameters in what a node multiplies, and whether it multiplies them with data."""
    kind = name.partition("Backward")[0]
    if kind not in _PRODUCTS:
        return frozenset(), False
    first, last = _PRODUCTS[kind]
    factors = inputs[:first] + inputs[len(inputs) - last :]
    weights = _union(factors)
    with_data = kind in _LOOKUPS or None in factors or (kind not in _OF_VECTORS and not all(factors))
    return weights, bool(weights) and with_data


def _union(sets: Iterable[_Below]) -> frozenset[Any]:
    return frozenset(p for one in sets for p in one or ())


def _graph(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """All nodes of a graph, after the nodes that have made their inputs: these, for each."""
    graph, makers, waiting = {}, {}, list(roots)
    while waiting:
        node = waiting.pop()
        if node not in makers:
            makers[node] = inputs_of(node)
            waiting += [node, *(one for one in makers[node] if one is not None and one not in makers)]
        elif node not in graph:
            graph[node] = makers[node]
    return graph


def _own_nodes(graph: Mapping[Any, list[Any]], entries: Mapping[Any, Any]) -> set[Any]:
    """What the calls of layers have made: from their outputs to their inputs and parameters."""
    own: set[Any] = set()
    for output, entry in entries.items():
        waiting = [output]
        while waiting:
            node = waiting.pop()
            own.add(node)
            waiting += [one for one in graph[node] if one not in (None, entry) and one not in entries]
    return own
