"""H_A and H_G of a layer as others read them."""

from kfqn_ext.linalg.operators import Inverses, SymmetricOperator
from kfqn_ext.optim.groups.plan import Block, working_dtype
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.recipe import Recipe


def inverses(block: Block, recipe: Recipe) -> Inverses | None:
    """A layer's inverses, read when they are multiplied with; None where they were not made from data yet.

    None also where another process keeps them.
    """
    if not blocks.is_started(block) or blocks.is_empty(block.state) or blocks.is_elsewhere(block.state):
        return None
    state, weight = block.state, block.layer.weight
    *outer, d_out, d_in = block.layer.geometry.matrix_shape
    recipe = recipe.at(d_in)
    like = working_dtype(weight), weight.device
    return Inverses(
        H_A=SymmetricOperator((*outer, d_in, d_in), *like, lambda M: recipe.input_inverse.precondition(state, M.mT).mT),
        H_G=SymmetricOperator((*outer, d_out, d_out), *like, lambda M: recipe.output_inverse.precondition(state, M)),
        dampings=recipe.split(block.group["damping"], blocks.balance(block, recipe)),
        fisher=recipe.output_inverse.fisher,
    )
