"""A scaled loss, as for float16, is nothing that an optimizer has to be told: its curvature is in units of its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import OnePassKBFGS
from tests.cases import assert_close
from tests.optim.family import FAMILY
from tests.optim.plain_loop import batch, close, left, net
from tests.optim.test_resume import assert_identical

OVERFLOWS = pytest.mark.parametrize("step", [0, 2], ids=["first step", "later step"])


class Run:
    """A model that is trained with a scaled loss, in mixed precision where a dtype is given."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = net().float(), dtype
        self.optimizer = OnePassKBFGS(self.model)
        enabled = scale != 1.0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale if enabled else 1.0, enabled=enabled)

    def backward(self, k: int, factor: float = 1.0) -> None:
        x, y = batch(k)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(x.float()), y)
        self.scaler.scale(loss * factor).backward()

    def step(self, clip: float | None = None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, steps: range, **options: Any) -> "Run":
        for k in steps:
            self.backward(k)
            self.step(**options)
        return self

    def left(self) -> dict[str, Any]:
        return left(self.model, self.optimizer)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_powers_of_two_change_no_bit(dtype: torch.dtype | None) -> None:
    """Also where the scale grows on the way."""
    plain, scaled = Run(dtype=dtype), Run(2.0**16, dtype)
    scaled.scaler.set_growth_interval(2)
    for run in (plain, scaled):
        run.train(range(3)).train(range(3, 6), clip=0.5)
    assert scaled.scaler.get_scale() == 2.0**19
    assert_identical(scaled.left(), plain.left())


def test_float16() -> None:
    """As in float32 to the rounding of float16, whatever the scale is, which nobody says."""
    want = Run().train(range(4)).left()
    for scale in (2.0**8, 2.0**14):
        found = Run(scale, torch.float16).train(range(4)).left()
        close(found, want, 0.01)


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@OVERFLOWS
def test_a_step_that_the_scaler_skips_leaves_nothing(step: int, clear: str) -> None:
    """Neither in the state nor in what was heard."""
    plain, scaled = Run(), Run(2.0**16)
    for run in (plain, scaled):
        run.train(range(step))
    before = scaled.left()
    scaled.backward(9, float("inf"))
    scaled.scaler.step(scaled.optimizer)
    scaled.scaler.update()
    assert_identical(scaled.left(), before)
    getattr(scaled, clear).zero_grad()
    assert scaled.scaler.get_scale() == 2.0**15
    for run in (plain, scaled):
        run.train(range(step, step + 3))
    assert_identical(scaled.left(), plain.left())


def first_step(clip: float) -> tuple[Any, Any, float]:
    """A model, its optimizer, and what its gradients were multiplied with."""
    model = net()
    optimizer = OnePassKBFGS(model)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
    optimizer.step()
    return model, optimizer, min(1.0, clip / norm)


def test_clipping_changes_the_momentum_alone() -> None:
    """A first step is as long as without, for its length is set, and as much is learned from it."""
    (free, of_free, all_of_it), (clipped, of_clipped, share) = first_step(1e9), first_step(1e-2)
    assert all_of_it == 1.0 and share < 0.1
    for i in (0, 3, 6):
        want, got = (o.state[m[i].weight] for m, o in ((free, of_free), (clipped, of_clipped)))
        assert_close(clipped[i].weight.detach(), free[i].weight.detach(), 1e-12)
        for key, factor in (("momentum", share), ("H_A", 1.0), ("u", 1.0)):
            assert_close(got[key], factor * want[key], 1e-5 if key == "momentum" else 1e-12)
        for key in ("H_G", "trace_A", "leverage"):
            assert torch.equal(got[key], want[key]), key


# ------------------------------------------------------------------ float16, whose scale can't be seen in a gradient


def half_loss(model: nn.Module) -> Tensor:
    x, y = batch(0)
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x.float()), y)


def test_a_closure_needs_no_scale_either() -> None:
    run = Run()

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = half_loss(run.model)
        loss.backward()
        return loss

    for _ in range(2):  # in the first there is no H_G yet to choose directions by
        run.optimizer.step(closure)
    assert all(d.G.kept for d in run.optimizer.diagnostics())


def test_where_units_matter_the_scale_must_be_said() -> None:
    """Of rows that learn from one pass as well."""
    model = net().float()
    optimizer = FAMILY["one pass"].make(model, lr=0.1)
    half_loss(model).backward()
    with pytest.raises(RuntimeError, match=r"first_pass\(loss_scale=scaler.get_scale\(\)\)"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.first_pass(loss_scale=1.0):
        half_loss(model).backward()
    optimizer.step()
