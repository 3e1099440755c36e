"""
A transformer with a split of parameters
========================================

Kronecker blocks for the linear layers, AdamW for embeddings and norms, and no weight decay for vectors. The task is to
reverse a sequence of digits.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from kfqn_ext import OnePassKBFGS

torch.set_num_threads(1)
LENGTH, WIDTH, HEADS, STEPS = 8, 32, 4, 150


class Block(nn.Module):
    """Attention and two linear layers, each called as a module, so that it can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, WIDTH] → the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).relu())


class Transformer(nn.Module):
    """Digits and their places in, digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T] → [N, T, 10]."""
        return self.head(self.norm(self.blocks(self.digits(x) + self.places.weight)))


# %%
# Weight and bias of a layer may be in two groups that differ in their weight decay alone. ``print`` shows what each
# parameter gets: embeddings and norms have no Kronecker block.


def ours(model):
    """Decay for matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return OnePassKBFGS(model, groups)


print(ours(Transformer()))


# %%
# The same data, weights and schedule for AdamW, at the best of three rates.


def losses(make):
    """The loss of each step."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    curve = []
    for _ in range(STEPS):
        x = torch.randint(10, (64, LENGTH))
        loss = cross_entropy(model(x).flatten(0, 1), x.flip(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        curve.append(loss.item())
    return curve


curves = {"OnePassKBFGS(model, groups)": losses(ours)}
adams = {lr: losses(lambda m, lr=lr: torch.optim.AdamW(m.parameters(), lr)) for lr in (1e-3, 3e-3, 1e-2)}
best = min(adams, key=lambda lr: sum(adams[lr][-10:]))
curves[f"AdamW, best of three: {best:g}"] = adams[best]

figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for style, (name, curve) in zip(("-", "--"), curves.items(), strict=True):
    axes.semilogy(curve, style, linewidth=2, label=name)
    print(f"{name:32} mean loss of the last ten steps {sum(curve[-10:]) / 10:.2e}")
axes.set(xlabel="step", ylabel="loss of the minibatch")
axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=2)
plt.show()
