"""Who keeps the state of which layer: divided by size, the same in every process, and all in one process."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, KFAC, Minibatch
from kfqn_ext.optim.groups.plan import make_plan
from kfqn_ext.optim.preconditioner.owners import Owners, assigned
from kfqn_ext.optim.recipe import Recipe
from tests.optim.family import FAMILY, rows
from workloads.nets import vgg16

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@dataclass
class Nowhere:
    """Of several processes, one that sends nothing."""

    size: int
    rank: int = 0

    def spread(self, tensors: Any, senders: Any) -> list[Tensor]:
        raise NotImplementedError

    def total(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def gathered(self, part: Any, receiver: int) -> None:
        raise NotImplementedError


def owners_of(model: nn.Module, recipe: Recipe, ranks: int) -> str:
    layers = make_plan(model, dict.fromkeys(model.parameters(), 0)).layers
    owners = Owners(recipe, Nowhere(ranks))
    owners.assign(layers)
    return owners.share(layers)


def test_the_largest_first_to_the_rank_with_least_so_far() -> None:
    assert assigned([5, 9, 1, 4, 4], [0, 0]) == [1, 0, 1, 1, 0]
    assert assigned([1, 1, 1], [0, 0, 0]) == [0, 1, 2]
    assert assigned([2, 3], [4, 0]) == [1, 1]  # what is there counts, and stays
    assert assigned([], [0, 0]) == []


@pytest.mark.parametrize(("ranks", "share"), [(2, "50.3%"), (4, "33.5%"), (6, "16.8%"), (16, "16.8%")])
def test_the_share_of_the_fullest_rank(ranks: int, share: str) -> None:
    """Layers are not cut: of VGG16's, three have a sixth of all state each."""
    with torch.device("meta"):
        model = vgg16(10)
    assert owners_of(model, KBFGS.recipe_as_printed, ranks) == f"{share} on the fullest of {ranks} processes"


@pytest.mark.parametrize("name", FAMILY)
def test_every_row_says_how_large_its_state_is(name: str) -> None:
    assert owners_of(net(), FAMILY[name].recipe, 2)


@pytest.mark.parametrize("name", rows(lambda member: "shard_state" in member.keywords))
def test_one_process_owns_everything(name: str) -> None:
    """A script for several runs in one, to the last bit as without the option."""
    found = []
    for options in ({}, {"shard_state": True}):
        model, member = net(), FAMILY[name]
        optimizer = member.make(model, lr=0.1, damping=0.5, **options)
        for _ in range(3):
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        assert "processes" not in repr(optimizer)
        found.append([*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


def test_the_whole_state_of_one_process() -> None:
    model = net()
    optimizer = KBFGS(model)
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    whole, own = optimizer.gather_state(), optimizer.state_dict()
    assert whole is not None and whole["param_groups"] == own["param_groups"]
    assert all(
        torch.equal(value, whole["state"][i][key]) for i, kept in own["state"].items() for key, value in kept.items()
    )


@pytest.mark.parametrize("build", [KBFGS, KFAC])
def test_a_part_is_refused_by_layer(build: Any) -> None:
    model = net()
    optimizer = build(model)
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    part = optimizer.state_dict()
    part["state"] = {**part["state"], 2: {"num_locations": part["state"][2]["num_locations"]}}
    before = optimizer.state[model[2].weight]
    with pytest.raises(ValueError, match=r"of 2 it has no curvature.*torch\.distributed\.checkpoint.*gather_state"):
        optimizer.load_state_dict(part)
    assert optimizer.state[model[2].weight] is before
