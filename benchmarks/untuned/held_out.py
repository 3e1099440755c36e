"""Problems of other families: nothing is chosen on them, and they are run once, at the end."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.untuned import data
from benchmarks.untuned.layers import Apply, Positions, Residual, Swapped, mlp, patches, transformer_block
from benchmarks.untuned.problem import SmallProblem

_PATCH, _PLACES = 7, 16  # of images of 28×28


def mobile() -> nn.Sequential:
    """Depthwise and pointwise convolutions in turn, with GroupNorm."""

    def normalized(convolution: nn.Conv2d) -> list[nn.Module]:
        return [convolution, nn.GroupNorm(4, convolution.out_channels), nn.ReLU()]

    layers = normalized(nn.Conv2d(1, 16, 3, padding=1, bias=False))
    for channels, out, stride in ((16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)):
        layers += normalized(nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False))
        layers += normalized(nn.Conv2d(channels, out, 1, bias=False))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class GRU(nn.Module):
    """A gated recurrent network over the rows of an image; its two layers are called once a row."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.of_state.in_features)
        for row in x.squeeze(1).unbind(1):
            update, reset, new = self.of_input(row).chunk(3, 1)
            update_too, reset_too, new_too = self.of_state(state).chunk(3, 1)
            keep = torch.sigmoid(update + update_too)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_too) * new_too)
            state = keep * state + (1 - keep) * candidate
        return self.head(state)


def _of_patches(width: int, blocks: list[nn.Module]) -> nn.Sequential:
    first = [Apply(partial(patches, size=_PATCH)), nn.Linear(_PATCH**2, width), Positions(_PLACES, width)]
    return nn.Sequential(*first, *blocks, nn.LayerNorm(width), Apply(partial(torch.mean, dim=1)), nn.Linear(width, 10))


def vit() -> nn.Sequential:
    return _of_patches(48, [transformer_block(48, 4, causal=False) for _ in range(3)])


def mixer() -> nn.Sequential:
    """MLPs along places and along channels in turn."""
    blocks: list[nn.Module] = []
    for _ in range(3):
        blocks += [Residual(64, Swapped(mlp(_PLACES, 32))), Residual(64, mlp(64, 128))]
    return _of_patches(64, blocks)


class Sine(nn.Module):
    """A linear layer and a sine, initialized so that all layers' outputs are alike."""

    frequency = 30.0

    def __init__(self, d_in: int, d_out: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_out)
        bound = 1 / d_in if first else math.sqrt(6 / d_in) / self.frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def coordinates() -> nn.Sequential:
    """A network of sines that maps a place to the brightness there."""
    return nn.Sequential(Sine(2, 96, first=True), Sine(96, 96), Sine(96, 96), nn.Linear(96, 1))


class VAE(nn.Module):
    """A variational autoencoder: pixels to logits of pixels, with mean and logarithmic variance of the code."""

    def __init__(self, pixels: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def evidence_bound(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of the pixels, and the divergence of the code from a standard normal distribution."""
    logits, mean, log_variance = output
    pixels = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return (pixels + divergence) / len(target)


class Tabular(nn.Module):
    """Numbers and embedded categories, then an MLP with LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 6) for n in data.CARDINALITIES)
        layers: list[nn.Module] = []
        for d_in in (data.NUMBERS + 6 * len(data.CARDINALITIES), width, width):
            layers += [nn.Linear(d_in, width), nn.LayerNorm(width), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(width, data.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        categories = x[:, data.NUMBERS :].long().unbind(1)
        embedded = [embed(category) for embed, category in zip(self.embeddings, categories, strict=True)]
        return self.mlp(torch.cat([x[:, : data.NUMBERS], *embedded], 1))


_SMALL = partial(data.images, number=4000, size=14)
_LARGE = partial(data.images, number=6000, size=28)

HELD_OUT = {
    "mobile": SmallProblem("depthwise CNN with GroupNorm, MNIST at 14×14", mobile, _SMALL, F.cross_entropy, 64),
    "gru": SmallProblem(
        "gated recurrent network over rows, MNIST at 14×14", partial(GRU, 14, 48, 10), _SMALL, F.cross_entropy, 64
    ),
    "vit": SmallProblem("three attention blocks on patches, MNIST", vit, _LARGE, F.cross_entropy, 32),
    "mixer": SmallProblem("three MLP-mixer blocks on patches, MNIST", mixer, _LARGE, F.cross_entropy, 32),
    "coordinates": SmallProblem(
        "network of sines from places to brightness, a photograph, squared error",
        coordinates,
        lambda source: data.photograph(),
        F.mse_loss,
        1024,
    ),
    "vae": SmallProblem(
        "variational autoencoder, MNIST at 14×14",
        partial(VAE, 196, 256, 8),
        partial(data.pixels, number=6000, size=14),
        evidence_bound,
        128,
        samples=False,
    ),
    "tabular": SmallProblem(
        "MLP with LayerNorm and embeddings, a table of numbers and categories",
        partial(Tabular, 128),
        lambda source: data.table(),
        F.cross_entropy,
        256,
    ),
}
