"""Layers whose output is normalized at once: there ∂h̄ = 0, and H_G has nothing to learn.

BatchNorm in training mode subtracts the mean of what it is given, so that a shift of a channel changes nothing and
Σ_n Σ_t ∂h = 0 for the layer before it. Such layers are found from the network as it runs: a normalization reads the
very tensor that a layer made, and the layer's ∂h̄ is rounding noise, which it would not be were it read elsewhere too.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_batch_or_instance_norm
from kfqn_ext.extensions import KBFGSQuantities, LayerMoments
from kfqn_ext.linalg.pairs import dot
from kfqn_ext.optim.groups.plan import Block, Layer
from kfqn_ext.optim.inverses import Measured
from kfqn_ext.optim.preconditioner.block import is_started
from kfqn_ext.optim.recipe import Recipe

Results = Mapping[nn.Module, Measured]
Normalizers = dict[nn.Module, nn.Module]  # layer ↦ the module that normalizes its output


class NormalizedLayers:
    """Which layers stand before a normalization, and by which recipe these are treated: one without an output side.

    Layers are known by their modules, which outlive a plan.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Know of no layer yet."""
        cheaper = recipe.output_inverse.where_shifts_are_removed()
        self._recipe = recipe
        self._cheaper = None if cheaper is None else replace(recipe, output_inverse=cheaper)
        self._known: Normalizers | None = None  # None: not looked for yet
        self._spared: set[nn.Module] = set()  # those that need no output side in this step
        self._dues = 0  # steps so far in which a layer was due

    @property
    def known(self) -> Collection[nn.Module] | None:
        """The layers' modules; None before the network was looked at."""
        return self._known

    def begin(self, due: bool) -> None:
        """Find out which layers need no output side in the step that begins, in which some layer is due or none.

        A layer that is also read by a path without a gradient, as through a gain that starts at zero, looks like one of
        them until the gain has moved. So all are looked at again when the number of steps with a due layer is a power
        of two.
        """
        self._dues += due
        if due and self._dues.bit_count() == 1:
            self._known = None
        self._find_spared()

    def _find_spared(self) -> None:
        """Modules change their mode."""
        self._spared = {module for module, norm in (self._known or {}).items() if removes_shifts(norm)}

    def recipe_of(self, layer: Layer) -> Recipe:
        """The row of the table by which a layer is treated in this step."""
        spared = self._cheaper is not None and layer.module in self._spared
        recipe = self._cheaper if spared and self._cheaper is not None else self._recipe
        return recipe.at(layer.geometry.d_in)

    @contextmanager
    def look(self, model: nn.Module, due: Sequence[Block]) -> Iterator[Normalizers | None]:
        """Look for such layers while the body runs the model, where it is time; yield what will be found, or None.

        Those whose H_G has learned something are none, as far as this process knows.
        """
        if self._known is not None or not due or self._cheaper is None:
            yield None
            return
        with find_normalizers(model, [block.layer.module for block in due]) as found:
            yield found
        for block in due:
            if block.layer.module in found and _has_learned(block):
                del found[block.layer.module]

    def settle(self, due: Sequence[Block], found: Normalizers, first: Results, finite: Tensor) -> None:
        """Keep the layers whose ∂h̄ is indeed noise; waits for the device."""
        if not found:
            self._known = {}
        elif bool(finite):
            modules = [
                block.layer.module
                for block in due
                if block.layer.module in found and _needs_no_output_side(block, first.get(block.layer.module))
            ]
            self._known = {module: found[module] for module in modules}
            self._find_spared()

    def forget(self, layer: Layer) -> None:
        """H_G of this layer learns: its normalization has stopped removing shifts."""
        if self._known and layer.module not in self._spared:
            self._known.pop(layer.module, None)


def _has_learned(block: Block) -> bool:
    """Whether H_G is known to have learned from a pair; waits for the device."""
    seen = block.state.get("pairs_seen_G")
    return seen is not None and bool(seen[0].any())


def _needs_no_output_side(block: Block, measured: Measured | None) -> bool:
    moments = None if measured is None else measured.get(KBFGSQuantities)
    return is_started(block) and moments is not None and bool(is_noise(moments))


def removes_shifts(module: nn.Module) -> bool:
    """Whether a module normalizes with the mean of its own input: batch and instance normalization can."""
    return is_batch_or_instance_norm(module) and (module.training or module.running_mean is None)


@contextmanager
def find_normalizers(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[Normalizers]:
    """Find out which layers' outputs are what a normalization reads, while the body runs the model.

    Yields:
        A dictionary that fills while the body runs.
    """
    made_by: dict[Any, nn.Module] = {}  # by the node of autograd's graph, which an in-place operation replaces
    found: Normalizers = {}

    def note_output(layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None and not torch.compiler.is_compiling():
            made_by[output.grad_fn] = layer

    def note_input(norm: nn.Module, args: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.grad_fn in made_by:
            found[made_by[x.grad_fn]] = norm

    hooks = [layer.register_forward_hook(note_output) for layer in layers]
    hooks += [norm.register_forward_pre_hook(note_input) for norm in model.modules() if removes_shifts(norm)]
    try:
        yield found
    finally:
        made_by.clear()
        for hook in hooks:
            hook.remove()


def is_noise(moments: LayerMoments) -> Tensor:
    """Whether ∂h̄ is below its rounding error, bool []."""
    return (dot(moments.dh_bar, moments.dh_bar) <= dot(moments.dh_noise, moments.dh_noise)).all()
