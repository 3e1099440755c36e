"""Random small networks against autograd: ``python -m tests.real.fuzz --count 2000 --seed 0``.

A seed makes a network: layers of all kinds and paddings, in-place operations on their outputs, shared, tied, frozen,
unused, normed and overridden layers, in float64, float32 or bfloat16. Every quantity must equal what autograd says
without any hook, and an optimizer must take two steps; or an error or a warning must name the layer.
"""

import argparse
import copy
import random
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY
from tests.real import watch

# Relative to the size of the terms. Quantities of low-precision layers are float32, and gradients that autograd adds up
# in another order differ by that dtype's rounding.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Overridden(nn.Linear):
    """Computes something else: to be refused."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.sin(), self.bias)


@dataclass
class Stage:
    """A layer, how often and how it is called, and what is done to its output in place."""

    name: str
    calls: int = 1
    how: str = "positional"
    shortcut: bool = False
    changes: list[str] = field(default_factory=list)
    activation: str = "tanh"
    norm: str | None = None
    flatten: bool = False
    checkpointed: bool = False


class RandomNet(nn.Module):
    """The network of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.stages: list[Stage] = []
        self.dtype = rng.choice([torch.float64] * 6 + [torch.float32, torch.float32, torch.bfloat16])
        dims, n = rng.choice([0, 0, 1, 2, 2, 3]), rng.choice([1, 2, 5])
        if dims:
            space = [rng.randint(4, 6 if dims < 3 else 5) for _ in range(dims)]
            shape: tuple[int, ...] = (n, rng.choice([1, 2, 4]), *space)
        else:
            shape = (n, *(rng.randint(1, 3) for _ in range(rng.choice([0, 0, 1, 2]))), rng.randint(1, 5))
        self.x = torch.randn(shape)
        for i in range(rng.randint(1, 4)):
            shape, dims = self._add(f"l{i}", shape, dims)
        self._share_and_freeze()
        self.to(self.dtype)
        self.x = self.x.to(self.dtype)
        self.seed = seed

    def _add(self, name: str, shape: tuple[int, ...], dims: int) -> tuple[tuple[int, ...], int]:
        rng, stage = self.rng, Stage(name)
        if dims and rng.random() < 0.3:
            stage.flatten = True
            shape, dims = (shape[0], torch.Size(shape[1:]).numel()), 0
        bias = rng.random() < 0.7
        if dims:
            layer = self._conv(shape, dims, bias)
        else:
            kind = rng.choices([nn.Linear, Overridden], [15, 1])[0]
            layer = kind(shape[-1], rng.choice([shape[-1], rng.randint(1, 5)]), bias=bias)
            if rng.random() < 0.05:
                layer = parametrizations.weight_norm(layer)
        self.add_module(name, layer)
        with torch.no_grad():
            out = tuple(layer(torch.zeros(shape)).shape)
        stage.shortcut = out == shape and rng.random() < 0.3
        stage.calls = rng.choice([1, 1, 2]) if out == shape else 1
        stage.how = rng.choices(["positional", "keyword", "functional"], [8, 3, 1])[0]
        if stage.how == "functional" and (dims or type(layer) is not nn.Linear):
            stage.how = "positional"
        stage.changes = [c for c in ("mul_", "slice", "dropout_", "add_") if rng.random() < 0.2]
        stage.activation = rng.choice(["tanh", "relu", "relu_", "sigmoid_", "none", "sin"])
        if rng.random() < 0.25:
            channels = out[1] if dims else out[-1]
            if dims and out[0] * torch.Size(out[2:]).numel() > 1:
                stage.norm = rng.choice(["batch", "group"])
                norm: nn.Module = CHOSEN_NORM[dims](channels) if stage.norm == "batch" else nn.GroupNorm(1, channels)
                self.add_module(f"{name}_norm", norm)
            elif not dims:
                stage.norm = "layer"
                self.add_module(f"{name}_norm", nn.LayerNorm(channels))
        stage.checkpointed = rng.random() < 0.1 and "dropout_" not in stage.changes and stage.norm != "batch"
        self.stages.append(stage)
        return out, dims

    def _conv(self, shape: tuple[int, ...], dims: int, bias: bool) -> nn.Module:
        rng, space = self.rng, shape[2:]
        groups = rng.choice([g for g in (1, 1, 2, 4) if shape[1] % g == 0])
        out = rng.choice([shape[1], groups * rng.randint(1, 3)])
        mode = rng.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
        padding: Any = rng.choice(["same", "valid", "ints", "ints"])
        dilation = tuple(rng.choice([1, 1, 2]) for _ in space)
        stride = tuple(1 if padding == "same" else rng.choice([1, 1, 2]) for _ in space)
        if padding == "ints":
            padding = tuple(rng.randint(0, min(2, n - 1)) for n in space)
        room = [n + 2 * p for n, p in zip(space, padding if isinstance(padding, tuple) else (0,) * dims, strict=True)]
        kernel = []
        for n, r, d in zip(space, room, dilation, strict=True):
            largest = min(3, (r - 1) // d + 1, n - 1 if padding == "same" and d == 1 else (n - 1) // d)
            kernel.append(rng.randint(1, max(1, largest)))
        return CONVS[dims](
            shape[1], out, tuple(kernel), stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias,
            padding_mode=mode,
        )  # fmt: skip

    def _share_and_freeze(self) -> None:
        rng, layers = self.rng, [getattr(self, stage.name) for stage in self.stages]
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        if len(plain) > 1 and rng.random() < 0.3:
            for other in plain[1:]:
                if other.weight.shape == plain[0].weight.shape:
                    other.weight = plain[0].weight
        for layer in layers:
            for p in layer.parameters():
                if rng.random() < 0.08:
                    p.requires_grad_(False)
        if rng.random() < 0.1:
            for p in layers[0].parameters():
                p.requires_grad_(False)
        if rng.random() < 0.1:
            self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            if stage.checkpointed and torch.is_grad_enabled():
                x = checkpoint(self._stage, x, stage, use_reentrant=False)
            else:
                x = self._stage(x, stage)
        return x

    def _stage(self, x: Tensor, stage: Stage) -> Tensor:
        layer: Any = getattr(self, stage.name)
        x = x.flatten(1) if stage.flatten else x
        for call in range(stage.calls):
            shortcut, y = x, self._call(layer, x, stage.how)
            if stage.shortcut:
                y += shortcut
            for change in stage.changes:
                y = self._change(y, change)
            if call + 1 < stage.calls:
                x = y.tanh()
        if stage.norm is not None:
            y = getattr(self, f"{stage.name}_norm")(y)
        if stage.activation == "none":
            return y
        return getattr(y, stage.activation)()

    @staticmethod
    def _call(layer: Any, x: Tensor, how: str) -> Tensor:
        if how == "functional":
            return F.linear(x, layer.weight, layer.bias)
        return layer(input=x) if how == "keyword" else layer(x)

    @staticmethod
    def _change(y: Tensor, change: str) -> Tensor:
        if change == "mul_":
            return y.mul_(1.5)
        if change == "add_":
            return y.add_(0.25)
        if change == "slice":
            y[..., :1] *= 2
            return y
        return F.dropout(y, 0.4, inplace=True)


# torch says so about every even kernel; only its result matters.
EVEN_SAME = "Using padding='same' with even kernel lengths"
CHOSEN_NORM: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def loss_of(output: Tensor, _: Any = None) -> Tensor:
    return (output.sin() + 0.5 * output.square()).flatten(1).sum(1).mean()


def check(seed: int) -> str:
    """Raise where something is wrong; else say how it ended: "equal", or the kind of what was named."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EVEN_SAME)
        net = RandomNet(seed)
        x = net.x
        if not loss_of(copy.deepcopy(net)(x)).requires_grad:
            return "nothing to train"

    def run(model: Any) -> Tensor:
        torch.manual_seed(seed + 1)
        return loss_of(model(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", EVEN_SAME)
        watch.check(net, run, TOLERANCE[net.dtype])
    names = set(watch.layers(net))
    member = FAMILY[net.rng.choice(list(FAMILY))]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", EVEN_SAME)
        try:
            optimizer = member.make(net, lr=1e-3)
            for _ in range(2):
                optimizer.step(Minibatch(net, loss_of, x, torch.zeros(1), sample_targets=lambda output, y, g: y))
        except (NotImplementedError, RuntimeError) as error:
            assert names & set(re.findall(r"\w+", str(error))), error
            return f"refused: {type(error).__name__}"
    for message in {str(w.message) for w in said}:
        assert names & set(re.findall(r"\w+", message)), message
    assert all(p.isfinite().all() for p in net.parameters())
    return "equal, a layer named" if said else "equal"


def main(count: int, seed: int) -> int:
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    failed: list[int] = []
    for one in range(seed, seed + count):
        try:
            ends[check(one)] += 1
        except Exception as error:  # noqa: BLE001 - every kind of failure is a finding
            failed.append(one)
            print(f"seed {one}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
    parts = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    print(f"- {count} random networks from seed {seed}: {len(failed)} failures ({parts}). `python -m tests.real.fuzz`")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.count, arguments.seed)))
