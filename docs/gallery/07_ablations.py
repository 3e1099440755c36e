"""
Ablations: improvements #1 and #2
=================================

The paper improves on the K-BFGS of 2020 in two ways. #1: pairs are damped by D_P D_LM. #2: A is this minibatch's, no
moving average. Each is a cell of the recipe, so that turning it off is one ``replace``.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.linalg import double_damping_2020
from kfqn_ext.optim import KroneckerOptimizer, SecondPass
from kfqn_ext.optim.inverses import MovingHessianAction, ScaledIdentity, SecantBFGS

torch.set_num_threads(1)
x = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32) / 16

printed = KBFGS.recipe_as_printed
rows = {
    "K-BFGS": printed,
    "#1 off": replace(printed, output_inverse=SecantBFGS(pair_damping=double_damping_2020)),
    "#2 off": replace(printed, input_inverse=MovingHessianAction()),
    "no second pass, H_G = I/λ_G": replace(printed, output_inverse=ScaledIdentity(), second_pass=SecondPass.NONE),
}


# %%
# An autoencoder of digits, as in the paper's experiments but small. Pixels are grey, so that no output has a loss of
# zero: the curves show how far above the least possible they are.

least = -(x.xlogy(x) + (1 - x).xlogy(1 - x)).sum(1).mean().item()


def loss_fn(output, y):
    """A sum over pixels, a mean over images."""
    return binary_cross_entropy_with_logits(output, y, reduction="sum") / len(y)


def losses(recipe):
    """The loss on all data above the least one, every five steps."""
    torch.manual_seed(0)
    sizes = [64, 32, 8, 32, 64]
    layers = [layer for d, k in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(d, k), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    optimizer = KroneckerOptimizer(model, recipe=recipe, lr=0.3, damping=0.3)
    curve = []
    for step in range(151):
        if step % 5 == 0:
            with torch.no_grad():
                curve.append((step, loss_fn(model(x), x).item() - least))
        batch = x[torch.randint(len(x), (256,))]
        optimizer.step(Minibatch(model, loss_fn, batch, batch))
    return curve


figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for style, (name, recipe) in zip(("-", "--", "-.", ":"), rows.items(), strict=True):
    curve = losses(recipe)
    axes.semilogy(*zip(*curve, strict=True), style, linewidth=2, label=name)
    print(f"{name:28} {curve[-1][1]:.4f}")
axes.set(xlabel="step", ylabel="training loss above the least")
axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=2)
plt.show()

# %%
# One seed at one learning rate and damping. :doc:`/results` has the paper's ablation at its own values.
