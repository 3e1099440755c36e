"""Which parameter gets which treatment, and why: decided once, for all parameters, before anything is changed."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_divided
from kfqn_ext.errors import UnsupportedLayerError, listed
from kfqn_ext.geometry import LayerGeometry, geometry_of, is_layer, refusal


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with a Kronecker block.

    Attributes:
        name: Its name in the model.
        module: The layer.
        geometry: What it computes.
        weight: Its weight; the block's state is kept under it.
        bias: Its bias where that is optimized too.
    """

    name: str
    module: nn.Module
    geometry: LayerGeometry
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Block:
    """A layer with its hyperparameters and its state, as they are in this step.

    torch replaces groups and states when it loads, so that nothing may hold a block from one step to the next.

    Attributes:
        layer: The layer.
        group: The parameter group of its weight.
        state: The optimizer's state of its weight; a new dictionary where there is none yet.
    """

    layer: Layer
    group: dict[str, Any]
    state: dict[str, Tensor]


OTHER = "other"
"""Treatment of parameters without a Kronecker block; a recipe's rule for them has a name of its own."""
GONE = "the model has it no longer"
"""Reason of parameters that were the model's when they were added."""


@dataclass(frozen=True)
class Treatment:
    """A line of the table of treatments."""

    parameter: str
    shape: tuple[int, ...]
    treatment: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What becomes of each parameter.

    Attributes:
        layers: Layers with a block, by their weights.
        covered: The weights of such layers by their biases.
        treatments: The table a person reads.
        names: Of all parameters.
        places: Where the model has them: modules, and names in these.
        split: Names of layers whose weight is in one group and whose bias in another, by the indices of the two.
    """

    layers: dict[Tensor, Layer]
    covered: Mapping[Tensor, Tensor]
    treatments: tuple[Treatment, ...]
    names: Mapping[Tensor, str]
    places: Mapping[Tensor, tuple[nn.Module, str]]
    split: Mapping[tuple[int, int], tuple[str, ...]]

    @cached_property
    def weights(self) -> Mapping[nn.Module, Tensor]:
        """The weights of layers with a block, by module, which holds another one while FSDP2 has gathered it."""
        return {layer.module: weight for weight, layer in self.layers.items()}

    def blocks(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]) -> list[Block]:
        """All layers as they stand now, in the order of the groups' parameters."""
        return [
            Block(self.layers[p], group, state.get(p, {}))  # get: reading state[p] would make an entry
            for group in groups
            for p in group["params"]
            if p in self.layers
        ]

    def role(self, p: Tensor) -> Hashable:
        """What the tensors of a parameter's state depend on; None where the model has it no longer."""
        if p in self.layers:
            return self.layers[p].geometry.matrix_shape
        return (OTHER, p in self.covered) if p in self.places else None

    def check_places(self) -> None:
        """Raise a RuntimeError where the model trains other parameters in the places of those that are optimized."""
        moved = [p for p, (module, name) in self.places.items() if module._parameters.get(name) is not p]
        new = {p: self.places[p][0]._parameters.get(self.places[p][1]) for p in moved}
        late = [self.names[p] for p, q in new.items() if is_divided(q) and not is_divided(p)]
        if late:
            raise RuntimeError(
                f"fully_shard was called after the optimizer was built: it has put other parameters in the places of "
                f"{listed(late)}, and the optimizer still has the old ones. Build it after fully_shard."
            )
        replaced = [self.names[p] for p, q in new.items() if q is not None and q.requires_grad and q not in self.names]
        if replaced:
            raise RuntimeError(
                f"The model has new parameters in the places of {listed(replaced)}, as after load_state_dict(..., "
                "assign=True). Their gradients do not reach the optimizer, which still has the old ones. Load before "
                "the optimizer is built, or without assign=True; parameters that are new on purpose are added by "
                "add_param_group."
            )


def working_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: its own, float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)


def make_plan(model: nn.Module, group_of: dict[Tensor, int], before: Mapping[Tensor, str] | None = None) -> Plan:
    """Assign every optimized parameter to a Kronecker block, or to the rule for those that have none.

    Args:
        model: The model.
        group_of: Index of the parameter group of each optimized parameter.
        before: Names of parameters that the model had when they were added: it may have lost them since, as those of
            a head that was replaced.

    Returns:
        The plan.

    Raises:
        ValueError: If a parameter is not the model's.
        UnsupportedLayerError: If no layer can be measured, or the model is lazy and has not run yet.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    gone = {p: name for p, name in (before or {}).items() if p not in names}
    strangers = [tuple(p.shape) for p in group_of if p not in names and p not in gone]
    if strangers:
        raise ValueError(
            f"Parameters of shapes {strangers} are not parameters of the model. Pass params=None for all of the "
            "model's, or a subset of model.parameters()."
        )
    lazy = [name for p, name in names.items() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise UnsupportedLayerError(
            f"{', '.join(lazy)}: lazy parameters without a shape yet. Run one forward pass, then build the optimizer."
        )
    layers, reasons = _find_layers(model, group_of)
    covered = {layer.bias: layer.weight for layer in layers.values() if layer.bias is not None}
    reasons |= dict.fromkeys(gone, GONE)
    named = {p: gone[p] if p in gone else names[p] for p in group_of}
    treatments = tuple(_treatment(name, p, layers, covered, group_of, reasons, model) for p, name in named.items())
    if not layers:
        found = "; ".join(f"{(names | gone)[p]}: {why}" for p, why in reasons.items()) or "no Linear or Conv layer"
        raise UnsupportedLayerError(
            f"{type(model).__name__} has no layer with a Kronecker block ({found}). "
            "Use a torch.optim optimizer, or register your kind of layer with kfqn_ext.geometry.register."
        )
    return Plan(layers, covered, treatments, named, _places(model, group_of), _split(layers, group_of))


def _places(model: nn.Module, group_of: dict[Tensor, int]) -> dict[Tensor, tuple[nn.Module, str]]:
    return {
        p: (module, name)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and p in group_of
    }


def _find_layers(model: nn.Module, group_of: dict[Tensor, int]) -> tuple[dict[Tensor, Layer], dict[Tensor, str]]:
    owners: Counter[Tensor] = Counter(
        p for module in model.modules() for p in module._parameters.values() if p is not None
    )
    layers: dict[Tensor, Layer] = {}
    reasons: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        if not is_layer(module):
            continue
        reason = refusal(module)
        parameters = list(module.parameters())  # those of a parametrization included
        if reason is None and module.weight.numel() == 0:
            reason = "its weight is empty"
        if reason is None and owners[module.weight] > 1:
            reason = "its weight belongs to several modules, and its gradient is the sum over all of them"
        if reason is not None:
            reasons.update(dict.fromkeys(parameters, reason))
            continue
        geometry, bias = geometry_of(module), getattr(module, "bias", None)
        if geometry is None:
            continue
        if bias is not None and owners[bias] > 1:
            reasons[bias], bias = "it belongs to several modules", None
        if module.weight in group_of:
            bias = bias if bias in group_of else None
            layers[module.weight] = Layer(name or type(module).__name__, module, geometry, module.weight, bias)
        elif bias is not None:
            reasons[bias] = "the weight of its layer is not optimized"
    return layers, reasons


def _split(layers: dict[Tensor, Layer], group_of: dict[Tensor, int]) -> dict[tuple[int, int], tuple[str, ...]]:
    split: dict[tuple[int, int], tuple[str, ...]] = {}
    for layer in layers.values():
        if layer.bias is not None and group_of[layer.weight] != group_of[layer.bias]:
            key = group_of[layer.weight], group_of[layer.bias]
            split[key] = (*split.get(key, ()), layer.name)
    return split


def _treatment(
    name: str,
    p: Tensor,
    layers: dict[Tensor, Layer],
    covered: dict[Tensor, Tensor],
    group_of: dict[Tensor, int],
    reasons: dict[Tensor, str],
    model: nn.Module,
) -> Treatment:
    shape = tuple(p.shape)
    if p in layers:
        geometry = layers[p].geometry
        blocks = f"{geometry.groups} × " if geometry.groups > 1 else ""
        return Treatment(name, shape, "Kronecker", f"H_G {blocks}[{geometry.d_out}²], H_A {blocks}[{geometry.d_in}²]")
    if p in covered:
        own = "" if group_of[p] == group_of[covered[p]] else f", with the weight decay of group {group_of[p]}"
        return Treatment(name, shape, "Kronecker", f"last column of its layer's W{own}")
    if p in reasons:
        return Treatment(name, shape, OTHER, reasons[p])
    owner = model.get_submodule(name.rpartition(".")[0])
    return Treatment(name, shape, OTHER, f"{type(owner).__name__} is not of the form h = W a")
