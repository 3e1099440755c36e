"""
Learning rate and damping
=========================

The loss after a short training at each pair of the two, for the default form and for the paper's. A cross marks a
training that diverged.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:1024], dtype=torch.float32) / 16, torch.tensor(labels[:1024])
STEPS = 30


def loss_after(make, lr, damping):
    """Of one training; NaN where it ends higher than it began."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = make(model, lr=lr, damping=damping)
    before = cross_entropy(model(x), y).item()
    for step in range(STEPS):
        rows = torch.arange(128 * step, 128 * (step + 1)) % len(x)
        optimizer.step(Minibatch(model, cross_entropy, x[rows], y[rows]))
    after = cross_entropy(model(x), y).item()
    return after if after < before else float("nan")


# %%
# In the default form α says how long a step is, and ε counts in units of each factor's mean eigenvalue. In the paper's,
# α and λ have to fit each other: α/λ is roughly the step of SGD where the curvature is small.

grids = {
    "KBFGS(model, lr=α, damping=ε)": (KBFGS, [0.03, 0.1, 0.3, 1.0, 3.0], [0.01, 0.03, 0.1, 0.3, 1.0]),
    "KBFGS.as_printed(model, lr=α, damping=λ)": (
        KBFGS.as_printed,
        [0.01, 0.03, 0.1, 0.3, 1.0],
        [0.03, 0.1, 0.3, 1.0, 3.0],
    ),
}
losses = {
    title: torch.tensor([[loss_after(make, lr, damping) for lr in rates] for damping in dampings])
    for title, (make, rates, dampings) in grids.items()
}
norm = LogNorm(min(t.nan_to_num(9).min() for t in losses.values()), max(t.nan_to_num(0).max() for t in losses.values()))

figure, panels = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
for axes, (title, table) in zip(panels, losses.items(), strict=True):
    _, rates, dampings = grids[title]
    image = axes.imshow(table, norm=norm, cmap="viridis", origin="lower")
    for i, j in ((i, j) for i in range(len(dampings)) for j in range(len(rates))):
        value = table[i, j].item()
        dark = value == value and norm(value) < 0.5
        axes.text(j, i, "×" if value != value else f"{value:.2g}", ha="center", va="center", color="w" if dark else "k")
    axes.set(xticks=range(len(rates)), xticklabels=rates, yticks=range(len(dampings)), yticklabels=dampings)
    axes.set_xlabel("α")
    axes.set_ylabel(title.rpartition("=")[2].rstrip(")"))
    axes.set_title(title, fontsize=9)
figure.colorbar(image, ax=panels, label=f"loss after {STEPS} steps", shrink=0.7)
plt.show()

# %%
# How many of the 25 pairs come within twice the best loss:

for title, table in losses.items():
    print(f"{title}: {(table < 2 * table.nan_to_num(9).min()).sum()}, diverged {table.isnan().sum()}")
