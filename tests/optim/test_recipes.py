"""A recipe whose cells do not fit together says so where it is written."""

from dataclasses import replace

import pytest

from kfqn_ext.optim import KBFGS
from kfqn_ext.optim.inverses import GammaInverse, ScaledIdentity
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
