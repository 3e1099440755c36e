"""
Training curves by epoch and by second
======================================

A small CNN on handwritten digits. K-BFGS and its one-pass form as they are built, beside Adam and SGD at the best of
three rates each. One seed and a small network: it shows how to look, and ranks nobody.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch, OnePassKBFGS

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
EPOCHS, BATCH = 6, 64


def network():
    """The same weights for everybody."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def train(make):
    """Loss on all data after each epoch, and the seconds of training until then."""
    model = network()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    losses, seconds = [cross_entropy(model(x), y).item()], [0.0]
    for _ in range(EPOCHS):
        start = time.perf_counter()
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.step(Minibatch(model, cross_entropy, x[rows], y[rows]))
        schedule.step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        with torch.no_grad():
            losses.append(cross_entropy(model(x), y).item())
    return losses, seconds


# %%
# A ``Minibatch`` is a closure, so that all of them can be given one.

methods = {
    "KBFGS(model)": [KBFGS],
    "OnePassKBFGS(model)": [OnePassKBFGS],
    "Adam": [lambda m, lr=lr: torch.optim.Adam(m.parameters(), lr) for lr in (1e-3, 3e-3, 1e-2)],
    "SGD, momentum 0.9": [lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr, 0.9) for lr in (0.01, 0.03, 0.1)],
}
curves = {}
for name, makers in methods.items():
    curves[name] = min((train(make) for make in makers), key=lambda curve: curve[0][-1])
    losses, seconds = curves[name]
    print(f"{name:20} loss {losses[-1]:.2e} after {seconds[-1]:.1f} s")

# %%
# Left what an epoch brings, right what a second brings.

figure, (by_epoch, by_second) = plt.subplots(1, 2, figsize=(8, 4), sharey=True, layout="constrained")
styles = {"KBFGS(model)": "-", "OnePassKBFGS(model)": "--", "Adam": "-.", "SGD, momentum 0.9": ":"}
for name, (losses, seconds) in curves.items():
    by_epoch.semilogy(losses, styles[name], linewidth=2, label=name)
    by_second.semilogy(seconds, losses, styles[name], linewidth=2)
by_epoch.set(xlabel="epochs", ylabel="training loss")
by_second.set(xlabel="seconds of training, one core")
for axes in (by_epoch, by_second):
    axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=2)
plt.show()
