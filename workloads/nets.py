"""The paper's networks, and smaller ones of the same kinds; torchvision is imported for those that have its parts."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def autoencoder(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them, except after the code, the narrowest layer: ``table_3``."""
    code = min(widths)
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        layers.append(nn.Linear(d_in, d_out))
        if d_out != code:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers[:-1])  # the output is a logit or a mean: no activation


def vgg16(classes: int) -> nn.Sequential:
    """Model D with BatchNorm after each convolution and one linear layer, ``sec_5``, for images of 32×32."""
    from torchvision.models.vgg import cfgs

    return _vgg(cfgs["D"], 3, classes)


def vgg8(classes: int) -> nn.Sequential:
    """A small network of the same kind for grey images of 28×28, to compare methods on a CPU."""
    return _vgg([16, 16, "M", 32, 32, "M", 64, 64, "M", 64, "M"], 1, classes)


def _vgg(widths: Sequence[int | str], channels: int, classes: int) -> nn.Sequential:
    from torchvision.models.vgg import make_layers

    features = make_layers(list(widths), batch_norm=True)
    if channels != 3:  # make_layers is for colour images
        features[0] = nn.Conv2d(channels, features[0].out_channels, kernel_size=3, padding=1)
    width = [w for w in widths if isinstance(w, int)][-1]
    return _initialized(nn.Sequential(*features, nn.Flatten(), nn.Linear(width, classes)))


def resnet(blocks_per_stage: int, channels: int, classes: int) -> nn.Sequential:
    """He et al.'s ResNet for small images, 6 × blocks + 2 layers, with shortcuts that have no parameters."""
    from torchvision.models.resnet import BasicBlock

    blocks: list[nn.Module] = []
    width = 16
    for stage_width in (16, 32, 64):
        for _ in range(blocks_per_stage):
            stride = stage_width // width
            shortcut = ZeroPaddedShortcut(stride) if stride > 1 else None
            blocks.append(BasicBlock(width, stage_width, stride, shortcut))
            width = stage_width
    stem = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return _initialized(nn.Sequential(*stem, *blocks, *head))


class ZeroPaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the new channels: He et al.'s option A, for doubled width."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, channels // 2, channels // 2))


def _initialized(net: nn.Sequential) -> nn.Sequential:
    """Initialize convolutions as He et al. and torchvision do; the paper does not say."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net
