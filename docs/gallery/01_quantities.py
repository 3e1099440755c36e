"""
Quantities of a layer
=====================

One backward pass tells what K-BFGS needs of a layer: the mean patch ā, the mean output h̄, and its mean gradient ∂h̄.
Three identities check them against autograd.
"""

import matplotlib.pyplot as plt
import torch
from backpack import backpack
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGSQuantities, extend

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:256], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:256])

# %%
# ``extend`` prepares the model, once. The extension is active inside ``with backpack(...)``.

model = extend(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 10)))
conv = model[0]
with backpack(KBFGSQuantities()):
    cross_entropy(model(x), y).backward()
q = conv.weight.kbfgs
print(q)

# %%
# The layer computes h_t = W a_t at 36 locations t of each image. Its bias is the last column of W, so ā ends with a 1.
# The gradients by bias and weight are sums over locations, and h̄ = W ā.

W = torch.cat((conv.weight.flatten(1), conv.bias.unsqueeze(1)), dim=1)
patches = nn.functional.unfold(x, 3).transpose(1, 2)  # what the package never forms
assert torch.allclose(q.a_bar[:-1], patches.mean((0, 1)), atol=1e-6)
assert torch.allclose(q.h_bar, W @ q.a_bar, atol=1e-6)
assert torch.allclose(q.num_locations * q.dh_bar, conv.bias.grad, atol=1e-6)

# %%
# The mean patch is brighter in the middle columns, where strokes are.

figure, (patch, outputs, gradients) = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
image = patch.imshow(q.a_bar[:-1].view(3, 3), cmap="gray")
figure.colorbar(image, ax=patch, shrink=0.8)
patch.set(title="ā, without its 1", xticks=[], yticks=[])
for axes, vector, title in ((outputs, q.h_bar, "h̄"), (gradients, q.dh_bar, "∂h̄")):
    axes.bar(range(8), vector.detach())
    axes.set(title=title, xlabel="channel")
plt.show()
