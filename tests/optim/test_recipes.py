"""A recipe whose cells do not fit together says so where it is written."""

from dataclasses import replace

import pytest
from torch import nn

from kfqn_ext.optim import KBFGS, KBFGSL
from kfqn_ext.optim.inverses import FisherAction, GammaInverse, ScaledIdentity, SecantLBFGS
from kfqn_ext.optim.recipe import SecondPass
from tests.optim.family import FAMILY, rows


@pytest.mark.parametrize("name", rows(lambda member: member.passes == 2))
def test_a_side_that_learns_from_a_second_pass_needs_one(name: str) -> None:
    recipe = FAMILY[name].recipe
    side = type(recipe.output_inverse).__name__
    with pytest.raises(ValueError, match=rf"{side} learn.* second_pass is NONE.*output_inverse=ScaledIdentity"):
        replace(recipe, second_pass=SecondPass.NONE)
    with pytest.raises(ValueError, match="GammaInverse learn"):
        replace(KBFGS.recipe_as_printed, output_inverse=GammaInverse(), second_pass=SecondPass.NONE)


def test_sides_without_one_are_fine() -> None:
    recipe = replace(KBFGS.recipe_as_printed, output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE)
    assert recipe.second_pass is SecondPass.NONE


def test_how_many_pairs_a_recipe_keeps() -> None:
    """Its own number, where no other is given; and a recipe without pairs has none."""
    seven = replace(KBFGSL.recipe, output_inverse=SecantLBFGS(history_size=7))
    made = [KBFGSL(nn.Linear(3, 2), **given) for given in ({}, {"recipe": seven}, {"recipe": seven, "history_size": 9})]
    assert [optimizer.recipe.output_inverse.history_size for optimizer in made] == [100, 7, 9]
    fisher = replace(KBFGSL.recipe, output_inverse=FisherAction())
    assert KBFGSL(nn.Linear(3, 2), recipe=fisher).recipe == fisher
    with pytest.raises(ValueError, match="history_size=9: FisherAction, .* keeps no pairs. Leave history_size out"):
        KBFGSL(nn.Linear(3, 2), recipe=fisher, history_size=9)
