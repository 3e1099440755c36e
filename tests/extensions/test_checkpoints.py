"""Checkpoints count what is saved: as much when they repeat a part of the model, whatever is measured then."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext import KBFGS, KBFGSQuantities, Minibatch, extend
from tests.cases import assert_close

F64 = torch.float64
NAMES = ("a", "b", "c")


class Net(nn.Module):
    """Three layers of a checkpointed block, some of them frozen, one of them called twice, and a head."""

    def __init__(self, frozen: tuple[str, ...] = (), checkpointed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in NAMES:
            self.add_module(name, nn.Linear(4, 4, dtype=F64).requires_grad_(name not in frozen))
        self.head, self.checkpointed = nn.Linear(4, 3, dtype=F64), checkpointed

    def block(self, x: Tensor) -> Tensor:
        for name in (*NAMES, "b"):
            x = self.get_submodule(name)(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x))


def run(model: nn.Module, ext: Any, forward: bool, backward: bool) -> None:
    """One forward and one backward pass, each inside the context or not."""
    x = torch.rand(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with backpack(ext) if forward else nullcontext():
        loss = model(x).square().sum()
    with backpack(ext) if backward else nullcontext():
        loss.backward()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("frozen", [(), ("a",), ("b",), ("c",), ("a", "b"), NAMES])
@pytest.mark.parametrize(("forward", "backward"), [(False, True), (True, False), (True, True), (False, False)])
def test_what_is_active_may_change_before_the_backward_pass(
    forward: bool, backward: bool, frozen: tuple[str, ...], named: bool
) -> None:
    """Gradients and quantities are those of the same passes without a checkpoint."""
    models = [extend(Net(frozen, checkpointed)) for checkpointed in (True, False)]
    extensions = [KBFGSQuantities(modules=m.children() if named else None) for m in models]
    for model, ext in zip(models, extensions, strict=True):
        run(model, ext, forward, backward)
    for got, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None and want.grad is not None:
            assert_close(got.grad, want.grad, 1e-12)
    for name, layer in models[1].named_children():
        twin = models[0].get_submodule(name)
        assert (twin in extensions[0]) == (layer in extensions[1])
        if layer in extensions[1]:
            for field in ("a_bar", "h_bar", "dh_bar"):
                assert_close(getattr(extensions[0][twin], field), getattr(extensions[1][layer], field), 1e-12)


def test_a_loop_that_leaves_its_forward_pass_outside() -> None:
    """As fine-tuning does: frozen layers, adapters that are trained, and a backward pass in the context."""
    results = []
    for checkpointed in (True, False):
        model = Net(("a", "b"), checkpointed)
        optimizer = KBFGS(model, lr=0.1, damping=0.3, curvature_update_freq=1)
        for k in range(3):
            x = torch.rand(6, 4, dtype=F64, generator=torch.Generator().manual_seed(k)).requires_grad_()
            minibatch = Minibatch(model, nn.functional.cross_entropy, x, torch.arange(6) % 3)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), torch.arange(6) % 3)
            with optimizer.first_pass():
                loss.backward()
            optimizer.step()
            if optimizer.second_pass_due:
                with optimizer.second_pass():
                    minibatch()
        results.append([p.detach() for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 1e-10)
