"""What a user writes, for a type checker: `mypy --strict` finds nothing in it. It runs, too."""

from typing import assert_type

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KBFGSQuantities, Minibatch, OnePassKBFGS, extend
from kfqn_ext.extensions import GramOperator, LayerMoments

layer = nn.Linear(4, 3)
model = extend(nn.Sequential(layer))
x, y = torch.rand(8, 4), torch.randint(3, (8,))
moments = KBFGSQuantities()
with backpack(moments):
    torch.autograd.backward(cross_entropy(model(x), y))
assert_type(moments.get(layer), LayerMoments | None)
assert_type(moments[layer].A, GramOperator)
assert_type(moments[layer].A @ moments[layer].a_bar, Tensor)
optimizer = KBFGS(model)
assert_type(optimizer.step(Minibatch(model, cross_entropy, x, y)), Tensor)
one_pass = OnePassKBFGS(model)
torch.autograd.backward(cross_entropy(model(x), y))
assert_type(one_pass.step(), None)
flat: dict[str, int | float] = optimizer.diagnostics().as_dict()
