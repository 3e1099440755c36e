"""
The ladder of approximations
============================

The exact Hessian block of a layer, beside what Kronecker methods put in its place. Each rung gives something up: the
coupling of locations, that of data, the exactness of the factors.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import curvature_ladder

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:64], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:64])

model = nn.Sequential(
    nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 12), nn.Tanh(), nn.Linear(12, 10)
)
optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0)
for _ in range(30):
    optimizer.step(Minibatch(model, cross_entropy, x, y))

# %%
# ``print`` shows a table for each layer.

report = curvature_ladder(model, cross_entropy, x, y, layers=["0", "3"], optimizers=optimizer, progress=False)
print(report)

# %%
# Errors are relative, in the Frobenius norm, without damping. On the linear layer, with one location, the first rungs
# are exact; on the convolution leaving out the coupling of locations already costs most of it.

rungs = ["Σ A_tt' ⊗ G_tt'", "uncorrelated locations", "one product per datum", "A ⊗ G"]
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for shift, (layer, name, color) in enumerate((("0", "convolution", "tab:blue"), ("3", "linear", "0.6"))):
    errors = [report[layer, rung].error for rung in rungs]
    bars = axes.barh([i + 0.4 * shift for i in range(len(rungs))], errors, height=0.38, label=name, color=color)
    axes.bar_label(bars, fmt="%.2g", padding=3)
axes.set(yticks=[i + 0.2 for i in range(len(rungs))], yticklabels=rungs, xlabel="relative error")
axes.invert_yaxis()
axes.margins(x=0.12)
figure.legend(loc="outside right upper")
plt.show()
