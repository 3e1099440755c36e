"""What FSDP2 must not break: weights are whole inside the hooks, and rows of them lie on each rank between passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kfqn_ext.extensions import KBFGSQuantities, KFACFactors, extend, input_gradients_only
from tests.distributed.cases import (
    NETS,
    TOLERANCE,
    Pair,
    alone,
    by_closure,
    case,
    data,
    equal_shares,
    parameters,
    same,
    share,
    unequal_shares,
)
from tests.optim.family import FAMILY

FIELDS = ("a_bar", "h_bar", "dh_bar")


def whole(model: nn.Module, **options: Any) -> nn.Module:
    """One unit: all weights are gathered for the forward pass, and stay until the backward pass where nobody objects."""
    return fully_shard(model, **options)


def by_block(model: nn.Module, **options: Any) -> nn.Module:
    """Units of several layers, so that of each only the last one's output has the hook that gathers."""
    fully_shard([model[0], model[1], model[2]], **options)
    return fully_shard(model, **options)


def by_layer(model: nn.Module, **options: Any) -> nn.Module:
    """A unit for each layer."""
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


WAYS: dict[str, Callable[..., nn.Module]] = {"whole": whole, "by block": by_block, "by layer": by_layer}
RESHARDS: dict[str, dict[str, Any]] = {"as torch does": {}, "always": {"reshard_after_forward": True}, "never": {"reshard_after_forward": False}}  # fmt: skip


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


@case(*((net, way, reshard, order) for net in NETS if net in ("mlp", "cnn") for way in WAYS for reshard in RESHARDS for order in ("extended before", "extended after")))
def quantities(ranks: int, which: tuple[str, str, str, str]) -> None:
    """Of every layer what one process has of this rank's data, in several passes, with and without gradients."""
    net, way, reshard, order = which
    model, twin = NETS[net][0](), extend(NETS[net][0]())
    model = extend(model) if order == "extended before" else model
    model = extend(WAYS[way](model, **RESHARDS[reshard]))
    for k in range(3):
        x, y = (share(t, equal_shares(ranks)) for t in data(net, k))
        for alone in (False, True):
            found, want = (KBFGSQuantities(modules=layers_of(one)) for one in (model, twin))
            for one, ext in ((model, found), (twin, want)):
                with input_gradients_only(one) if alone else torch.enable_grad(), backpack(ext):
                    F.cross_entropy(one(x), y).backward()
            for got, reference in zip(layers_of(model), layers_of(twin), strict=True):
                q, r = found[got], want[reference]
                for name in FIELDS:
                    same(getattr(q, name), getattr(r, name), 1e-12)
                s = torch.ones_like(r.a_bar)
                same(q.A @ s, r.A @ s, 1e-12)


# ------------------------------------------------------------------ the same steps as one process


def pair_of(row: str, net: str, way: str = "whole", reshard: str = "as torch does", **options: Any) -> Pair:
    """A model that processes share, and its twin that this process trains with the data of all."""
    member, build = FAMILY[row], NETS[net][0]
    model, twin = WAYS[way](build(), **RESHARDS[reshard]), build()
    setting = {"lr": 0.1, "damping": 0.5, **options}
    optimizer = member.make(model, **setting)
    return Pair(model, optimizer, twin, member.make(twin, process_group=alone(), **setting), member.samples)


def joined(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def check(pair: Pair, tolerance: float = TOLERANCE) -> None:
    """Parameters beside those of one process; each layer's state beside its, on one rank, and all other state too."""
    layers = {p: layer for layer in pair.optimizer._planned.layers.values() for p in (layer.weight, layer.bias)}
    owners = pair.optimizer._preconditioner.owners
    for p, twin in zip(parameters(pair.optimizer), parameters(pair.reference), strict=True):
        assert isinstance(p, DTensor)
        same(joined(p), twin, tolerance)
        state = pair.optimizer.state.get(p, {})
        found, want = {key: joined(state[key]) for key in sorted(state)}, pair.reference.state.get(twin, {})
        if p not in layers or owners.owns(layers[p]):
            assert set(found) == set(want), (set(found), set(want))
            for key in want:
                same(found[key], want[key], tolerance)
        else:
            assert set(found) <= {"num_locations"}, set(found)


ROWS_OF_STEPS = ("KBFGS", "KBFGS, untuned", "KFAC, untuned", "KBFGSL")


@case(*((row, net, way) for row in ROWS_OF_STEPS for net in ("mlp", "cnn") for way in WAYS))
def fsdp_steps(ranks: int, which: tuple[str, str, str]) -> None:
    row, net, way = which
    pair = pair_of(row, net, way, T=2)
    by_closure(pair, net, unequal_shares(ranks))
    check(pair)
