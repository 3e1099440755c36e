"""
A s beside A
============

K-BFGS never forms A = E_n[Σ_t a_t a_tᵀ], the second moment of a layer's patches. It multiplies with it. Here is what
that saves.
"""

import time

import matplotlib.pyplot as plt
import torch
from backpack import backpack
from torch import nn

from kfqn_ext import InputGram, KBFGSQuantities, extend
from kfqn_ext.geometry import geometry_of

torch.manual_seed(0)
torch.set_num_threads(1)

# %%
# Both extensions in one backward pass: ``q.A`` is an operator, ``gram.A`` the matrix.

conv = extend(nn.Conv2d(8, 16, 3, padding=1))
x = torch.rand(16, 8, 16, 16)
operator, matrix = KBFGSQuantities(), InputGram()
with backpack(operator, matrix):
    conv(x).square().mean().backward()
q, A = operator[conv], matrix[conv].A
s = torch.randn_like(q.a_bar)
print(q.A, "and", list(A.shape))
assert torch.allclose(q.A @ s, A @ s, rtol=1e-4, atol=1e-3)

# %%
# Time for one product, and for the matrix, as the number of channels grows. Both are methods of the layer's geometry.


def seconds(function):
    """The fastest of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


channels, product, formed = [4, 8, 16, 32, 64], [], []
for c in channels:
    layer, x = nn.Conv2d(c, 4, 3, padding=1), torch.rand(16, c, 16, 16)
    geometry, s = geometry_of(layer), torch.randn(9 * c + 1)
    product.append(seconds(lambda g=geometry, x=x, s=s: g.gram_product(x, s)))
    formed.append(seconds(lambda g=geometry, x=x: g.gram(x)))
    print(f"{c:3} channels: A s {1e3 * product[-1]:7.2f} ms, A {1e3 * formed[-1]:7.2f} ms")

# %%
# The product costs a pass over the input; the matrix grows with the square of the channels.

figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
axes.loglog(channels, formed, "s--", color="0.4", label="A")
axes.loglog(channels, product, "o-", color="tab:blue", linewidth=2.5, label="A s")
axes.set(xlabel="input channels of a 3 × 3 convolution", ylabel="seconds", xticks=channels, xticklabels=channels)
axes.minorticks_off()
axes.grid(alpha=0.3)
figure.legend(loc="outside right upper")
plt.show()
