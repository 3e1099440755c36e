"""
Watching H_A and H_G learn
==========================

``track_curvature`` compares what an optimizer holds with the exact curvature, every few steps of a training. It is a
callback: call it after each step.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import track_curvature

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:512], dtype=torch.float32) / 16, torch.tensor(labels[:512])
model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.1, curvature_update_freq=1)

# %%
# The measurement is on a minibatch of its own, the same each time.

tracker = track_curvature(optimizer, model, cross_entropy, x[:64], y[:64], layers=["2"], steps=10)
for _ in range(80):
    rows = torch.randint(len(x), (128,))
    optimizer.step(Minibatch(model, cross_entropy, x[rows], y[rows]))
    tracker()

# %%
# Errors are relative, in the Frobenius norm. Each inverse is compared with that of the damped factor it stands for.

frame = tracker.to_dataframe()
learned = frame[frame["H_A_error"].notna()]
columns = ["step", "H_A_error", "H_G_error", "H_error"]
print(learned[columns].to_string(index=False))

figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
labels = {"H_A_error": "H_A vs (A + λ_A I)⁻¹", "H_G_error": "H_G vs (G + λ_G I)⁻¹", "H_error": "H_A ⊗ H_G vs both"}
for style, (column, label) in zip(("-", "--", ":"), labels.items(), strict=True):
    axes.plot(learned["step"], learned[column], style, linewidth=2, marker="o", label=label)
axes.set(xlabel="step", ylabel="relative error", ylim=(0, None))
axes.grid(alpha=0.3)
figure.legend(loc="outside right upper")
plt.show()
