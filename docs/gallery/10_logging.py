"""
Logging diagnostics
===================

``optimizer.diagnostics()`` tells what each layer has learned. It prints as a table, and ``as_dict()`` has flat names
and numbers, as TensorBoard's ``add_scalar`` and ``wandb.log`` take them.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(288, 32), nn.Tanh(), nn.Linear(32, 10)),
)
optimizer = KBFGS(model)

# %%
# Once an epoch is enough: it waits for the device a few times a layer.

log = []
for _ in range(8):
    for rows in torch.randperm(len(x)).split(128):
        optimizer.step(Minibatch(model, cross_entropy, x[rows], y[rows]))
    log.append(optimizer.diagnostics().as_dict())

# %%
# The convolution stands before BatchNorm, so its ∂h̄ is zero and its H_G keeps no pairs.

print(optimizer.diagnostics())
print(*(f"{name} = {value}" for name, value in log[-1].items()), sep="\n")

# %%
# Leverage is ``|T| āᵀ H_A ā``. It is at most 1 for the inverse of this minibatch's A + λ_A I.
# Far above 1, H_A is stale.

figure, (leverage, pairs) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for style, layer in zip(("-", "--", ":"), ("0", "4", "6"), strict=True):
    epochs = range(1, len(log) + 1)
    leverage.plot(epochs, [entry[f"{layer}/leverage"] for entry in log], style, linewidth=2, label=f"layer {layer}")
    pairs.plot(epochs, [entry[f"{layer}/H_G/kept"] for entry in log], style, linewidth=2)
leverage.set(xlabel="epoch", title="leverage of H_A", ylim=(0, None))
pairs.set(xlabel="epoch", title="pairs that H_G has kept")
for axes in (leverage, pairs):
    axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=3)
plt.show()
