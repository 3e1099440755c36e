"""Random training loops against the dense reference: ``python -m tests.real.fuzz_loops --count 500 --seed 0``.

A seed makes a small network in float64, a row of the family, and a loop as users write them: a closure or two phases,
micro-batches, clipping, frozen layers, checkpoints, autocast, an evaluation between the passes, an interruption, a
resumed run, two optimizers on two halves, ``functional_call``, extensions and hooks of the user's own. After six steps
parameters must be those of the reference, which knows of none of this.
"""

import argparse
import io
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import Minibatch
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY
from tests.optim.twins import TWINS

F64 = torch.float64
STEPS, LR, DAMPING, CLIP = 6, 0.1, 0.5, 0.05


class Net(nn.Module):
    """Stages one after the other, some of them inside checkpoints."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randint(0, 10**6))
        channels = rng.choice([2, 4])
        first: nn.Module = nn.Conv2d(
            2, channels, 3, stride=rng.choice([1, 2]), padding=1, groups=rng.choice([1, 2]), bias=rng.random() < 0.7
        )
        size = 5 if first.stride == (1, 1) else 3
        width = rng.randint(3, 6)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(first, nn.ReLU(inplace=True) if rng.random() < 0.5 else nn.Tanh()),
                nn.Sequential(nn.Flatten(2), nn.Linear(size**2, width), nn.LayerNorm(width), nn.Tanh()),
                nn.Sequential(nn.Flatten(), nn.Dropout(rng.choice([0.0, 0.2])), nn.Linear(channels * width, 3)),
            ]
        )
        self.reentrant: bool | None = None
        self.to(F64)

    @property
    def drops(self) -> bool:
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.modules())

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            if self.reentrant is None or not torch.is_grad_enabled() or (self.reentrant and not x.requires_grad):
                x = stage(x)
            else:
                x = checkpoint(stage, x, use_reentrant=self.reentrant, preserve_rng_state=True)
        return x


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""


def data(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(8, 2, 5, 5, dtype=F64, generator=generator), torch.arange(8) % 3


def second_best(output: Tensor, *unused: Any) -> Tensor:
    return output.topk(2, dim=1).indices[:, 1]


class Loop:
    """The loop of a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.name = rng.choice(list(FAMILY))
        self.member = FAMILY[self.name]
        self.T = rng.choice([1, 2, 3])
        one_pass = self.member.passes == 1
        self.halves = rng.random() < 0.2 and not one_pass
        self.form = rng.choice(["minibatch", "phases"] if self.member.samples else ["minibatch", "closure", "phases"])
        if self.halves:
            self.form = "phases"
        if one_pass and rng.random() < 0.7:
            self.form = "plain"
        state = rng.getstate()
        self.net, rng_of_net = self._net(state)
        self.twin, _ = self._net(state)
        rng.setstate(rng_of_net)
        in_phases = self.form == "phases"
        self.micro = rng.choice([1, 1, 2, 4]) if in_phases and not self.net.drops else 1
        self.clips = rng.random() < 0.25 and self.form in ("phases", "plain")
        self.decay = 1e-2 if rng.random() < 0.5 and self.member.takes("weight_decay") else 0.0
        self.schedule = rng.random() < 0.3 and not callable(self.member.keywords.get("lr"))
        self.frozen = rng.random() < 0.2
        self.net.reentrant = rng.choice([None, None, None, False, True])
        if self.net.reentrant and (self.frozen or self.net.drops):
            self.net.reentrant = False
        self.autocast = rng.random() < 0.15
        self.evaluates = rng.random() < 0.3 and self.form in ("phases", "plain")
        self.functional = rng.random() < 0.15
        self.own_extension = rng.random() < 0.2
        self.logs = rng.random() < 0.3 and self.form == "closure"
        self.interrupted_at = rng.choice([None, None, 1, 3]) if self.form == "closure" else None
        self.resumed_at = rng.choice([None, None, 1, 3, 4])
        self.options = {"weight_decay": self.decay} if self.member.takes("weight_decay") else {}
        self.spares_biases = self.decay > 0 and rng.random() < 0.3

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k not in ("rng", "member", "net", "twin", "optimizers")}
        return ", ".join(f"{key}={value}" for key, value in shown.items()) + f", reentrant={self.net.reentrant}"

    @staticmethod
    def _net(state: Any) -> tuple[Net, Any]:
        rng = random.Random()
        rng.setstate(state)
        return Net(rng), rng.getstate()

    # -------------------------------------------------------------- ours

    def build(self) -> None:
        """Make the optimizer, or one for each half."""
        parts = [self.net.stages[:1], self.net.stages[1:]] if self.halves else [self.net]
        if self.frozen and self.halves:
            parts = parts[1:]
        self.optimizers = [self._optimizer(part) for part in parts]

    def _optimizer(self, part: nn.Module) -> Any:
        setting = {"lr": LR, "damping": DAMPING, "T": self.T, **self.options}
        if not self.spares_biases:
            return self.member.make(part, **setting)
        groups = [[p for p in part.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        decays = self.decay, 0.0
        given = [{"params": g, "weight_decay": decay} for g, decay in zip(groups, decays, strict=True) if g]
        return self.member.make(part, params=given, **setting)

    def run(self) -> None:
        if self.frozen:
            self.net.stages[0].requires_grad_(False)
        self.build()
        for k in range(STEPS):
            if k == self.resumed_at:
                self.resume()
            for optimizer in self.optimizers if self.schedule else ():
                for group in optimizer.param_groups:
                    group["lr"] = self.lr(k)
            torch.manual_seed(k)
            getattr(self, self.form)(k)

    def resume(self) -> None:
        """Save all, and go on with a new network and new optimizers."""
        file = io.BytesIO()
        torch.save([self.net.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers]], file)
        file.seek(0)
        model, states = torch.load(file, weights_only=True)
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(1.0)
        self.net.load_state_dict(model)
        self.build()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def output(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            if self.functional:
                return functional_call(self.net, dict(self.net.named_parameters()), (x,))
            return self.net(x)

    def backward(self, k: int, sampled: bool = False) -> Tensor:
        x, y = data(k)
        total = torch.zeros((), dtype=F64)
        for x_, y_ in zip(x.chunk(self.micro), y.chunk(self.micro), strict=True):
            output = self.output(x_)
            loss = F.cross_entropy(output, second_best(output) if sampled else y_) / self.micro
            loss.backward()
            total += loss.detach()
        return total

    def zero_grad(self) -> None:
        self.net.zero_grad(set_to_none=self.rng.random() < 0.8)

    @contextmanager
    def users_own(self) -> Iterator[None]:
        """An extension of the user's own is active, or none."""
        extension = KBFGSQuantities()
        with backpack(*[extension] * self.own_extension):
            yield

    def between(self, k: int) -> None:
        """What a user does between two passes."""
        if not self.evaluates:
            return
        self.net.eval()
        x, y = data(100 + k)
        with torch.no_grad():
            self.net(x)
        if not self.net.reentrant:  # such a checkpoint knows backward() alone
            x.requires_grad_()
            torch.autograd.grad(F.cross_entropy(self.net(x), y), x)
        self.net.train()

    def minibatch(self, k: int) -> None:
        batch = Minibatch(self.net, F.cross_entropy, *data(k), second_best if self.member.samples else None)
        batch.model = nn.Module()
        batch.model.forward = self.output  # type: ignore[method-assign]
        batch.model.zero_grad = self.net.zero_grad  # type: ignore[method-assign]
        with self.users_own():
            self.optimizers[0].step(batch)

    def closure(self, k: int) -> None:
        interrupted = k == self.interrupted_at

        def evaluate() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.backward(k)
            if interrupted:
                raise Interrupted
            if self.logs:
                assert sum(float(p.grad.norm()) for p in self.net.parameters() if p.requires_grad) > 0
            return loss

        if interrupted:
            try:
                self.optimizers[0].step(evaluate)
            except Interrupted:
                interrupted = False
            torch.manual_seed(k)
        with self.users_own():
            self.optimizers[0].step(evaluate)

    def phases(self, k: int) -> None:
        self.zero_grad()
        with ExitStack() as stack:
            stack.enter_context(self.users_own())
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.first_pass(keep_inputs=self.micro > 1))
            self.backward(k)
        self.between(k)
        self.second(k)
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self.between(k)
        self.second(k)

    def second(self, k: int) -> None:
        due = [optimizer for optimizer in self.optimizers if optimizer.second_pass_due]
        if due:
            with ExitStack() as stack:
                for optimizer in due:
                    stack.enter_context(optimizer.second_pass())
                with self.users_own():
                    self.backward(k, sampled=self.member.samples)

    def plain(self, k: int) -> None:
        """The loop of any ``torch.optim`` optimizer; rows of one pass that do not listen need to be told."""
        (optimizer,) = self.optimizers
        listens = self.name == "OnePassKBFGS"
        optimizer.zero_grad()
        with self.users_own(), nullcontext() if listens else optimizer.first_pass():
            self.backward(k)
        self.between(k)
        self.clip()
        optimizer.step()

    def clip(self) -> None:
        if self.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)

    def lr(self, k: int) -> float:
        return LR * (1 - k / STEPS)

    # -------------------------------------------------------------- the reference's

    def expected(self) -> nn.Module:
        """The twin, trained by the dense reference."""
        twin = TWINS[self.name]
        if self.frozen:
            self.twin.stages[0].requires_grad_(False)
        period = "T1" if self.member.samples else "T"
        options: dict[str, Any] = {period: self.T, **self.options}
        if self.spares_biases:
            options["vector_decay"] = 0.0
        if self.member.samples:
            options["sample_targets"] = second_best
        reference = twin.make(self.twin, lr=LR, damping=DAMPING, **options)
        descend = reference.descend

        def clipped(first: ref.Pass, other_rate: float) -> None:
            if self.clips:
                norm = torch.stack([g.norm() for g in first.grads.values()]).norm()
                factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
                for layer in first.layers.values():
                    layer.DW = factor * layer.DW
                first.grads = {name: factor * g for name, g in first.grads.items()}
            descend(first, other_rate)

        reference.descend = clipped
        for k in range(STEPS):
            if self.schedule:
                reference.lr = self.lr(k)
            torch.manual_seed(k)
            reference.step(*data(k))
        return self.twin


def check(seed: int) -> str:
    """Raise where a loop ends elsewhere than the reference; else say what it was."""
    loop = Loop(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run()
    for (name, p), q in zip(loop.net.named_parameters(), loop.expected().parameters(), strict=True):
        try:
            assert_close(p.detach(), q.detach(), 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{name} in {loop}: {error}") from None
    return loop.form


def main(count: int, seed: int) -> int:
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    failed = 0
    for one in range(seed, seed + count):
        try:
            ends[check(one)] += 1
        except Exception as error:  # noqa: BLE001 - every kind of failure is a finding
            failed += 1
            print(f"seed {one}: {type(error).__name__}: {str(error)[:600]} [{Loop(one)}]", file=sys.stderr, flush=True)
    parts = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    print(f"- {count} training loops from seed {seed}: {failed} failures ({parts}). `python -m tests.real.fuzz_loops`")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.count, arguments.seed)))
