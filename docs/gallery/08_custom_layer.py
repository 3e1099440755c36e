"""
A layer of your own
===================

A layer is h_t = W a_t. ``register`` teaches a new kind with three methods, and two more where its weight is laid out
otherwise. All extensions and optimizers then know it.
"""

import matplotlib.pyplot as plt
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from kfqn_ext import KBFGSQuantities, OnePassKBFGS, extend
from kfqn_ext.extensions import FactorTraces
from kfqn_ext.geometry import LayerGeometry, register


class Transposed(nn.Module):
    """x @ weight + bias with a weight [in, out], as some language models have it."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:
        """[N, ..., d_in] → [N, ..., d_out]."""
        return x @ self.weight + self.bias


# %%
# What the package has to be told. ``patches`` are the a_t with a 1 for the bias, ``outputs`` are by location; the
# last two methods say that W is the weight's transpose.


class TransposedGeometry(LayerGeometry):
    """Locations are the dimensions between the first and the last."""

    def as_batch(self, x: Tensor) -> Tensor:
        return x if x.ndim > 1 else x.unsqueeze(0)

    def patches(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.outputs(x), (0, 1), value=1.0)

    def outputs(self, g: Tensor) -> Tensor:
        return g.unsqueeze(1).flatten(1, -2)

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT

    def from_matrix(self, matrix: Tensor, shape) -> Tensor:
        return matrix.mT


register(Transposed, lambda layer: TransposedGeometry(layer.weight.shape[0] + 1, layer.weight.shape[1], 1, True))

# %%
# The quantities, checked with autograd, and the traces that a split of the damping reads.

torch.manual_seed(0)
x, y = torch.randn(256, 5, 8), torch.randn(256, 5, 1)
y += x[..., :1].sin() * 3
model = extend(nn.Sequential(Transposed(8, 16), nn.Tanh(), Transposed(16, 1)))
moments, traces = KBFGSQuantities(), FactorTraces()
with backpack(moments, traces):
    mse_loss(model(x), y).backward()
q = moments[model[0]]
assert torch.allclose(q.num_locations * q.dh_bar, model[0].bias.grad, atol=1e-6)
print(q)
print("mean eigenvalues of A and Γ:", f"{traces[model[0]].A:.3g}", f"{traces[model[0]].G:.3g}")

# %%
# And an optimizer trains it, with a Kronecker block for each layer.

optimizer = OnePassKBFGS(model)
print(optimizer)
curve = []
for _ in range(100):
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    curve.append(loss.item())

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(curve, linewidth=2)
axes.axhline(1.0, color="0.5", linestyle="--")
axes.annotate("the noise in y", (60, 1.0), xytext=(0, 4), textcoords="offset points")
axes.set(xlabel="step", ylabel="loss")
axes.grid(alpha=0.3)
plt.show()
