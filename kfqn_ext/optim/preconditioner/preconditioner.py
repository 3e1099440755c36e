"""The curvature of all layers: which extensions it needs, and how it is made, learned, recomputed and applied.

Nothing here holds a layer's state: blocks come fresh at each step, for torch replaces states when it loads.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from kfqn_ext.extensions import FisherProducts, InputQuantities
from kfqn_ext.linalg.power_iteration import start_vector
from kfqn_ext.optim.groups.plan import Block, Layer, working_dtype
from kfqn_ext.optim.inverses import Measured, Seen, State
from kfqn_ext.optim.inverses.base import Direction, Kind
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner.normalized import NormalizedLayers
from kfqn_ext.optim.preconditioner.owners import Owners, to_be_filled
from kfqn_ext.optim.preconditioner.rounded import RoundedInverses
from kfqn_ext.optim.recipe import Recipe

Wanted = dict[Kind, list[nn.Module]]
"""Which modules an extension is to measure."""
Results = Mapping[nn.Module, Measured]
_NOTHING = Measured()


class WarnOnce(Protocol):
    """Takes a remark that is made once: of each text, or about each thing."""

    def __call__(self, message: str, about: Hashable = None) -> None: ...  # noqa: D102


class Preconditioner:
    """P = H_G M H_A of each layer, with H_A and H_G learned as a recipe says."""

    def __init__(self, recipe: Recipe, warn_once: WarnOnce, owners: Owners, makers: Owners) -> None:
        """Learn by a recipe.

        Args:
            recipe: The recipe.
            warn_once: Takes remarks.
            owners: Who keeps the state of a layer, and learns.
            makers: Who inverts a layer's matrices: its owner, or one of those that all keep its state.
        """
        self.recipe, self.owners, self._makers = recipe, owners, makers
        self.normalized = NormalizedLayers(recipe)
        self._rounded = RoundedInverses(warn_once)
        self._warn_once = warn_once

    def assign(self, layers: Mapping[Tensor, Layer]) -> None:
        """Find out who keeps, and who makes, what of which layer; see :meth:`Owners.assign`."""
        self.owners.assign(layers)
        self._makers.assign(layers)

    # ------------------------------------------------------------------ what is to be measured

    def wanted_first(self, due: Sequence[Block], fresh: Sequence[Block]) -> Wanted:
        """What the first pass measures: of layers that are due, and of those that have no curvature yet."""
        kinds: dict[nn.Module, frozenset[Kind]] = {block.layer.module: self.recipe_of(block).first for block in due}
        if not self.recipe.starts_in_second_pass:
            for block in fresh:
                module = block.layer.module
                kinds[module] = kinds.get(module, frozenset()) | self._starts_from(block)
        return _by_kind(kinds)

    def wanted_second(self, due: Sequence[Block]) -> Wanted:
        """What the second pass measures."""
        return _by_kind({block.layer.module: self.recipe_of(block).second for block in due})

    def recipe_of(self, block: Block) -> Recipe:
        """The row of the table by which a layer is treated in this step."""
        return self.normalized.recipe_of(block.layer)

    def _starts_from(self, block: Block) -> frozenset[Kind]:
        """What a layer's initial curvature is made from."""
        recipe = self.recipe.at(block.layer.geometry.d_in)
        # In a pass with sampled targets A comes from Ω.
        return recipe.starts_from & recipe.second if recipe.starts_in_second_pass else recipe.starts_from

    def probe_A(self, state: State, a_bar: Tensor, step: int) -> Direction | None:
        """Directions s in which A is looked at, [*B, d_in] or [*B, d_in, k], and what is kept with A s; or None."""
        return self.recipe.at(a_bar.shape[-1]).input_inverse.probe(state, a_bar, step)

    def directions(
        self, due: Sequence[Block], first: Results, step: int
    ) -> dict[nn.Module, tuple[Direction | None, Direction | None]]:
        """Those of layers that a pass has measured, each from who owns it; a collective.

        Returns:
            By module the directions s for A, and those for Γ, with what is kept with the products: see :meth:`probe_A`
            and :meth:`probe_G`. The latter is None where every process has chosen it in the pass.
        """
        blocks = [(block, first[block.layer.module]) for block in due if block.layer.module in first]
        at_inputs = [self._for_A(block, measured, step) for block, measured in blocks]
        at_outputs = [self._for_G(block, measured, step) for block, measured in blocks]
        sides = (at_inputs, at_outputs)
        sent = [(b.layer, pair[0]) for side in sides for (b, _), pair in zip(blocks, side, strict=True) if pair]
        arrived = iter(self.owners.spread(sent))
        As, Gs = ([pair and (next(arrived), pair[1]) for pair in side] for side in sides)
        return {block.layer.module: (A, G) for (block, _), A, G in zip(blocks, As, Gs, strict=True)}

    @property
    def late_G(self) -> bool:
        """Whether a process lacks state from which directions for Γ are chosen, so that the pass can't choose them."""
        return self.owners.several or self.owners.rows is not None

    def _for_A(self, block: Block, measured: Measured, step: int) -> Direction | None:
        inputs = measured.get(InputQuantities)
        return None if inputs is None else self._probe_or_template(block, inputs.a_bar, step)

    def _for_G(self, block: Block, measured: Measured, step: int) -> tuple[Tensor, Tensor] | None:
        rule, layer = self.recipe_of(block).output_inverse, block.layer
        if not self.late_G or measured.get(FisherProducts) is None or not blocks.is_started(block):
            return None
        if not blocks.is_elsewhere(block.state):
            return self.probe_G(block.state, step)
        shape = (*layer.geometry.blocks, layer.geometry.d_out, rule.num_directions)
        s = to_be_filled(shape, working_dtype(layer.weight), layer.weight.device)
        return s, s

    def _probe_or_template(self, block: Block, a_bar: Tensor, step: int) -> Direction | None:
        if not blocks.is_elsewhere(block.state):
            return self.probe_A(block.state, a_bar, step)
        chosen = self.probe_A(self.owners.template(block.layer), a_bar.to("meta"), step)
        return chosen and (to_be_filled(chosen[0].shape, chosen[0].dtype, a_bar.device), None)

    def probe_G(self, state: State, step: int) -> tuple[Tensor, Tensor] | None:
        """Directions s in which Γ is looked at, [*B, d_out, k], and what is kept with Γ s; None for none."""
        if "num_locations" not in state:
            return None
        M = state["momentum"]
        u = state["u"] if "u" in state else start_vector(M.flatten(0, -2)[0], M.shape[:-2])
        H_A_u = self.recipe.at(u.shape[-1]).input_inverse.precondition(state, u.unsqueeze(-2)).mT
        return self.recipe.output_inverse.probe(state, (M.to(H_A_u.dtype) @ H_A_u).squeeze(-1), step)

    # ------------------------------------------------------------------ making and learning

    def start(self, unstarted: Iterable[Block], results: Results) -> list[Block]:
        """Make the initial curvature of layers from what was measured, in their states; of others', leave a mark.

        What is needed for that alone is let go layer by layer: A is as large as the H_A that is made from it.

        Returns:
            Layers of which something was measured that is not finite: they have none yet.
        """
        rejected: list[Block] = []
        made: list[Block] = []
        for block in unstarted:
            measured = results.get(block.layer.module, _NOTHING)
            recipe = self.recipe.at(block.layer.geometry.d_in)
            if measured.has(self._starts_from(block)):
                (made if self._start(block, recipe, measured) else rejected).append(block)
            measured.keep(recipe.first | recipe.second)
        if self._is_divided:
            self._hand_out([(block, name) for block in made for name in self._made(block)])
        return rejected

    def _start(self, block: Block, recipe: Recipe, measured: Measured) -> bool:
        if self._makers.owns(block.layer):
            return blocks.start(block, recipe, measured)
        if self._is_divided:
            return blocks.start_from_another(block, recipe, measured, self._made(block))
        return blocks.start_elsewhere(block, recipe, measured)

    def _made(self, block: Block) -> State:
        return blocks.made_at_start(self._makers.template(block.layer), self.recipe)

    @property
    def _is_divided(self) -> bool:
        """Whether one process makes what all keep."""
        return self._makers.several and not self.owners.several

    def _hand_out(self, of_blocks: Sequence[tuple[Block, str]]) -> None:
        """Give all processes tensors of states as their makers have them; a collective."""
        for block, name in of_blocks:  # laid out as they arrive: products with other strides are rounded otherwise
            block.state[name] = block.state[name].contiguous()
        sent = [(block.layer, block.state[name]) for block, name in of_blocks]
        for (_, kept), arrived in zip(sent, self._makers.spread(sent), strict=True):
            if arrived.data_ptr() != kept.data_ptr():
                kept.copy_(arrived)

    def reached(self, block: Block, first: Results) -> bool:
        """Whether the first pass measured a layer that is due."""
        found = first.get(block.layer.module, _NOTHING)
        reached = found.has(self.recipe_of(block).first)
        if not reached and block.layer.weight.grad is not None and blocks.is_started(block):
            self._warn_once(
                f"Layer {block.layer.name} has a gradient but was not measured when its curvature was due (called "
                "through F.linear, or its weight multiplied outside of it too, or called with other weights or "
                "settings, or without a datum, compiled before it was extended, or backward() with "
                "create_graph=True?); it keeps what it has."
            )
        return reached

    def learn(self, due: Sequence[Block], first: Results, second: Results, finite: Tensor, step: int) -> None:
        """Let layers that have curvature learn from the minibatch of step k."""
        together = defaultdict(list)
        for block in due:
            before, after = (results.get(block.layer.module, _NOTHING) for results in (first, second))
            if blocks.is_started(block) and self.reached(block, first) and self._comparable(block, before, after):
                self.normalized.forget(block.layer)
                if blocks.is_elsewhere(block.state):
                    continue
                recipe = self.recipe_of(block)
                together[id(recipe), blocks.kin(block.layer)].append((block, before, after))
        for lessons in together.values():
            learners, befores, afters = zip(*lessons, strict=True)
            device = learners[0].layer.weight.device
            seen = Seen(befores, afters, finite.to(device), step)
            blocks.learn(learners, self.recipe_of(learners[0]), seen)

    def _comparable(self, block: Block, first: Measured, second: Measured) -> bool:
        """Whether the second pass reached a layer, with the data of the first."""
        kinds = self.recipe_of(block).second
        if not second.has(kinds):
            if first.has(kinds):
                self._warn_once(
                    f"Layer {block.layer.name} was measured in the first pass and not in the second, and learned "
                    "nothing. The second pass must repeat the first."
                )
            return False
        pairs = [(first.get(kind), second.get(kind)) for kind in kinds]
        before, after = next(((a, b) for a, b in pairs if a is not None), (None, None))
        if before is None or after is None:
            return True
        sizes = [(q.num_data, q.num_locations) for q in (before, after)]
        if sizes[0] != sizes[1]:
            self._warn_once(
                f"Layer {block.layer.name} saw {sizes[0][0]} data at {sizes[0][1]:g} locations in the first pass and "
                f"{sizes[1][0]} at {sizes[1][1]:g} in the second: it learned nothing from them. The second pass must "
                "repeat the first, micro-batches included, and auxiliary passes belong outside both. A layer that is "
                "given other data when the parameters have moved, as an expert by a router, learns when they agree.",
                about=("data", block.layer),
            )
        return sizes[0] == sizes[1]

    def update_inverses(self, due: Iterable[Block]) -> None:
        """Recompute what is not learned pair by pair."""
        if not self.recipe.recomputes:
            return
        here = [block for block in due if blocks.is_started(block) and not blocks.is_elsewhere(block.state)]
        for block in here:
            blocks.update_traces(block, self.recipe)
            mine = not self.recipe.recomputed or self._makers.owns(block.layer)
            (blocks.update_inverses if mine else blocks.leave_inverses_to_another)(block, self.recipe)
        if self._is_divided:
            self._hand_out([(block, name) for block in here for name in self.recipe.recomputed])

    # ------------------------------------------------------------------ using

    def direction(self, block: Block, M: Tensor) -> Tensor | None:
        """P = H_G M H_A, [*B, d_out, d_in]; None where a layer has no curvature."""
        if not blocks.is_started(block):
            return None
        view = self._rounded.view(block.layer.weight, block.state, block.group["direction_dtype"])
        return blocks.precondition(view, self.recipe_of(block), M)


def _by_kind(kinds: Mapping[nn.Module, frozenset[Kind]]) -> Wanted:
    """Modules by extension; where one extension extends another, it serves for both."""
    wanted: Wanted = {}
    for module, asked in kinds.items():
        for kind in sorted(asked, key=lambda kind: kind.__qualname__):  # the same order in every process
            if not any(other is not kind and issubclass(other, kind) for other in asked):
                wanted.setdefault(kind, []).append(module)
    return wanted
