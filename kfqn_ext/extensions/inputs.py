"""What K-BFGS needs from a layer's inputs alone: the mean of its patches, and products with A."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, TypeVar, cast

import torch
from torch import Tensor, nn

from kfqn_ext.errors import MissingQuantitiesError
from kfqn_ext.extensions.base import LayerExtension
from kfqn_ext.extensions.calls import SingleCalls
from kfqn_ext.extensions.gram_operator import GramOperator
from kfqn_ext.extensions.pooling import DATA, LOCATIONS, combined, over
from kfqn_ext.extensions.shown import Shown
from kfqn_ext.geometry import LayerGeometry, LayerPass, Subsampling
from kfqn_ext.linalg import full_precision

Probe = Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, Tensor | None] | None]
"""``f(module, a_bar) -> s`` or ``(s, kept)``: a direction, and what is handed on with A s; None for no direction."""
Chosen = tuple[Tensor | None, Tensor | None]  # the pair, of a layer


@dataclass(frozen=True, kw_only=True, repr=False)
class InputMoments(Shown):
    """What a layer's inputs in one pass say. Means are over the N data and |T| locations.

    Attributes:
        a_bar: ā = mean of the patches a_t, [*B, d_in]; ends with 1 where the layer has a bias.
        num_data: N.
        num_locations: |T|; an average where calls of one layer had different numbers.
        operator: ``A``, or None where a probe let the inputs go.
        s: The probe's direction s = f(module, ā), [*B, d_in], or several, [*B, d_in, k], or None.
        A_s: A s, shaped like s, or None.
        kept: What the probe has handed on, or None.
    """

    a_bar: Annotated[Tensor, over(LOCATIONS)]
    num_data: int
    num_locations: float
    operator: Annotated[GramOperator | None, combined(GramOperator.joined)] = None
    s: Annotated[Tensor | None, combined(itemgetter(0))] = None
    A_s: Annotated[Tensor | None, over(DATA)] = None
    kept: Annotated[Tensor | None, combined(itemgetter(0))] = None

    @property
    def A(self) -> GramOperator:
        """The operator A; ``q.A @ s`` is the minibatched product.

        Raises:
            MissingQuantitiesError: If a probe was used.
        """
        if self.operator is None:
            raise MissingQuantitiesError(
                "A is not available: with probe=..., inputs are let go once A s is known. "
                "Read s and A_s, or use the extension without a probe."
            )
        return self.operator


M = TypeVar("M", bound=InputMoments)


class InputQuantities(LayerExtension[M]):
    """ā and products with A for each layer: the input side of K-BFGS. The output's gradient is not read.

    The result, an :class:`InputMoments`, is ``weight.input_moments`` and ``ext[module]``. Nothing is unfolded: ā is
    taken from the batch mean of the input, and A s costs two products of the input with one column for each place of
    the kernel.
    """

    savefield = "input_moments"
    in_part = True

    def __init__(
        self,
        reduction: str = "mean",
        subsampling: Subsampling = None,
        probe: Probe | None = None,
        accumulate: bool = False,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        """Set up the extension.

        Args:
            reduction: "mean" or "sum": what the loss does over the data of a batch.
            subsampling: Which data of each batch to measure: indices, a fraction (its first data, rounded up), or None
                for all.
            probe: ``f(module, a_bar) -> s`` or ``(s, kept)``. A s is then computed at once and the input let go (where
                s is None, just let go); otherwise the result holds the layer's input for as long as it lives. A layer
                that is called several times in a pass is probed with its first call's ā, unless the caller sets
                ``late`` and calls :meth:`InputQuantities.finish`.
            accumulate: Merge over backward passes (micro-batches) too, until ``clear()``.
            modules: Measure these layers only, whether or not their weight needs a gradient.
        """
        super().__init__(reduction, subsampling, accumulate, modules)
        self.probe = probe
        self.late: Callable[[nn.Module], bool] = lambda module: False
        """Whether the input of a layer, where it is to be probed, is kept until ``finish``, for ā of all calls."""

    def finish(self, single: SingleCalls | None = None) -> None:
        """Probe the layers whose inputs were kept, too, and let these go; see :class:`LayerExtension`."""
        super().finish(single)
        for module, entry in list(self._results.items()):
            kept = entry.result
            if self.probe is not None and kept is not None and kept.operator is not None:
                self._keep(module, replace(entry, result=self._probed(module, kept)))

    def _probed(self, module: nn.Module, kept: M) -> M:
        with torch.no_grad(), full_precision():
            s, handed_on = self._chosen(module, kept.a_bar)
            return replace(kept, operator=None, s=s, A_s=None if s is None else kept.A.times(s), kept=handed_on)

    def _chosen(self, module: nn.Module, a_bar: Tensor) -> Chosen:
        """(s, kept) of a layer."""
        found = None if self.probe is None else self.probe(module, a_bar)
        return found if isinstance(found, tuple) else (found, None)

    @classmethod
    def blank(cls, geometry: LayerGeometry, like: Tensor) -> M:  # noqa: D102
        return cast(M, InputMoments(a_bar=like.new_zeros(*geometry.blocks, geometry.d_in), num_data=1, num_locations=1))

    def measure(self, module: nn.Module, layer: LayerPass) -> M:  # noqa: D102
        a_bar = layer.geometry.mean_patch(layer.x)
        chosen = self._chosen(module, a_bar)
        keeps = self.probe is None or (chosen[0] is not None and self.late(module))
        return self._result(layer, a_bar, (None, None) if keeps else chosen, keeps)

    def measure_more(self, module: nn.Module, old: M, layer: LayerPass) -> M:  # noqa: D102
        return self._result(layer, layer.geometry.mean_patch(layer.x), (old.s, old.kept), old.operator is not None)

    def add_gradient(self, module: nn.Module, old: M, layer: LayerPass) -> M:  # noqa: D102
        return old

    def _result(self, layer: LayerPass, a_bar: Tensor, chosen: Chosen, keeps: bool) -> M:
        return cast(M, self._inputs(layer, a_bar, chosen, keeps))

    def _inputs(self, layer: LayerPass, a_bar: Tensor, chosen: Chosen, keeps: bool) -> InputMoments:
        A, (s, kept) = GramOperator(layer.geometry, (layer.x,)), chosen
        return InputMoments(
            a_bar=a_bar,
            num_data=layer.num_data,
            num_locations=layer.num_locations,
            operator=A if keeps else None,
            s=s,
            A_s=None if s is None else A.times(s),
            kept=kept,
        )
