"""All public functions measure the same in every mode of torch, and refuse what cannot be measured at the door."""

import copy
import math
import sys
from typing import Any

import backpack
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import kfqn_ext
from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import (
    curvature_ladder,
    estimate_curvature,
    exact_block,
    exact_ggn_block,
    exact_output_hessians,
    track_curvature,
)
from tests.curvature.nets import CLASSES, F64, N, residual


def measure(model: nn.Module, loss_fn: Any, x: Any, y: Any, layer: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = track_curvature(optimizer, model, loss_fn, x, y, [layer], name="o")
    return str(tracker.measure())


def ladder(model: nn.Module, loss_fn: Any, x: Any, y: Any, layer: Any, **more: Any) -> str:
    return str(curvature_ladder(model, loss_fn, x, y, [layer], progress=False, **more))


def estimate(model: nn.Module, loss_fn: Any, x: Any, y: Any, layer: Any, **more: Any) -> str:
    return str(estimate_curvature(model, loss_fn, x, y, [layer], probes=4, progress=False, **more))


PUBLIC: dict[str, Any] = {
    "exact_block": exact_block,
    "exact_ggn_block": exact_ggn_block,
    "exact_output_hessians": exact_output_hessians,
    "curvature_ladder": ladder,
    "estimate_curvature": estimate,
    "CurvatureTracker": measure,
}


def same(found: Any, expected: Any) -> bool:
    return found == expected if isinstance(found, str) else torch.equal(found, expected) and bool(found.any())


@pytest.mark.parametrize("mode", [pytest.param(torch.no_grad, marks=pytest.mark.slow), torch.inference_mode])
@pytest.mark.parametrize("name", PUBLIC)
def test_curvature_does_not_depend_on_the_callers_mode(name: str, mode: Any) -> None:
    """Data and a model that were made in inference mode included."""
    for dtype in (torch.float32, F64):
        model, x, y = residual(nn.Tanh())
        model, x = model.to(dtype), x.to(dtype)
        expected = PUBLIC[name](model, cross_entropy, x, y, "first")
        with mode():
            made = type(model)(nn.Tanh()).to(dtype).eval()
            made.load_state_dict(model.state_dict())
            found = PUBLIC[name](model, cross_entropy, x, y, "first")
            from_within = PUBLIC[name](made, cross_entropy, x.clone(), y.clone(), "first")
        assert same(found, expected) and same(from_within, expected)


@pytest.mark.parametrize("extended_by", [kfqn_ext.extend, backpack.extend], ids=["ours", "BackPACK's"])
@pytest.mark.parametrize("name", PUBLIC)
def test_hooks_change_nothing(name: str, extended_by: Any) -> None:
    """And are there afterwards."""
    model, x, y = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
        torch.rand(N, 3),
        torch.arange(N) % 3,
    )
    twin = extended_by(copy.deepcopy(model))
    before = [(len(m._forward_hooks), len(m._backward_hooks)) for m in twin.modules()]
    for layer in ("0", "2"):
        found, expected = (PUBLIC[name](m, cross_entropy, x, y, layer) for m in (twin, model))
        assert same(found, expected)
    assert [(len(m._forward_hooks), len(m._backward_hooks)) for m in twin.modules()] == before


@pytest.mark.parametrize("name", PUBLIC)
def test_backpacks_hooks_and_operations_in_place(name: str) -> None:
    """Such a model can't run at all; the message says who is to blame, and the way out is one."""
    model, x, y = residual(nn.Tanh())
    expected = PUBLIC[name](model, cross_entropy, x, y, "first")
    with pytest.raises(RuntimeError, match=r"backpack.extend.*operation in place.*kfqn_ext.unextend\(model\)"):
        PUBLIC[name](backpack.extend(model), cross_entropy, x, y, "first")
    assert same(PUBLIC[name](kfqn_ext.unextend(model), cross_entropy, x, y, "first"), expected)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.query, self.last, self.fused = nn.Linear(4, 4), nn.Linear(4, CLASSES), fused

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unsqueeze(1)
        if self.fused:
            h = scaled_dot_product_attention(q, q, q)
        else:
            h = torch.softmax(q @ q.mT / math.sqrt(q.shape[-1]), -1) @ q
        return self.last(h.squeeze(1).mean(1))


@pytest.mark.parametrize("name", PUBLIC)
def test_layers_before_attention(name: str) -> None:
    """torch's fused kernel has no second derivative; the result is that of attention written out."""
    x, y = torch.rand(N, 5, 4, dtype=F64), torch.arange(N) % CLASSES
    fused, plain = Attention(True).double(), Attention(False).double()
    plain.load_state_dict(fused.state_dict())
    found, expected = (PUBLIC[name](model, cross_entropy, x, y, "query") for model in (fused, plain))
    if isinstance(found, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    else:
        assert "A ⊗ G" in found


class Weighted(nn.Module):
    """A loss with a parameter, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.rand(N, CLASSES), persistent=False)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        weight: Any = self.weight
        return cross_entropy(self.scale * z.addmm(self.shift, torch.eye(CLASSES, dtype=self.shift.dtype)), y, weight)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), Weighted()])
@pytest.mark.parametrize("name", PUBLIC)
def test_loss_modules_are_cast_with_the_model(name: str, loss_fn: nn.Module) -> None:
    model, x, y = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
        torch.rand(N, 3),
        torch.arange(N) % 3,
    )
    before = [t.clone() for t in (*loss_fn.parameters(), *loss_fn.buffers())]
    assert PUBLIC[name](model, loss_fn, x, y, "0") is not None
    after = [*loss_fn.parameters(), *loss_fn.buffers()]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(after, before, strict=True))
    if name == "exact_block":
        double = exact_block(copy.deepcopy(model).double(), copy.deepcopy(loss_fn).double(), x.double(), y, "0")
        assert torch.equal(exact_block(model, loss_fn, x, y, "0"), double)


def test_tensors_that_are_not_cast_are_named() -> None:
    model, x, y = nn.Sequential(nn.Linear(3, CLASSES)), torch.rand(N, 3), torch.arange(N) % 3
    weight = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match=r"cast from torch.float32 to torch.float64.*weight.to\(z\).*dtype=None"):
        exact_block(model, lambda z, y: cross_entropy(z, y, weight), x, y, "0")
    with pytest.raises(RuntimeError, match="^mat1 and mat2 shapes cannot be multiplied"):
        exact_block(model, cross_entropy, x[:, :2], y, "0")


@pytest.mark.parametrize("function", [curvature_ladder, estimate_curvature])
def test_mistakes_are_named_at_the_door(function: Any) -> None:
    model, x, y = residual(nn.Tanh())
    more = {"progress": False}
    with pytest.raises(ValueError, match="layers is empty"):
        function(model, cross_entropy, x, y, [], **more)
    for damping in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"damping={damping}: λ is a finite number"):
            function(model, cross_entropy, x, y, ["last"], damping=damping, **more)
    low = nn.Sequential(nn.Linear(3, CLASSES)).bfloat16()
    with pytest.raises(ValueError, match="torch.bfloat16 has no eigenvalues in torch: choose dtype=torch.float64"):
        function(low, cross_entropy, torch.rand(N, 3).bfloat16(), y, dtype=None, **more)
    assert len(function(low, cross_entropy, torch.rand(N, 3).bfloat16(), y, dtype=F64, **more)) == 1


@pytest.mark.parametrize("name", PUBLIC)
def test_numbers_that_are_not_finite_are_named(name: str) -> None:
    model, x, y = residual(nn.Tanh())
    with pytest.raises(ValueError, match="The loss is nan, .*all parameters are finite, so look at x and y"):
        PUBLIC[name](model, cross_entropy, x * math.nan, y, "first")
    with torch.no_grad():
        model.second.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="The loss is nan, .*parameters that are not finite: second.weight"):
        PUBLIC[name](model, cross_entropy, x, y, "first")
    with pytest.raises(ValueError, match="dtype=torch.int32 has no derivatives"):
        exact_block(model, cross_entropy, x, y, "first", dtype=torch.int32)


@pytest.mark.parametrize("function", [curvature_ladder, estimate_curvature])
def test_unused_layers_are_left_out_where_none_is_named(function: Any) -> None:
    model, x, y = residual(nn.Tanh())
    model.unused = nn.Linear(2, 2).double()
    report = function(model, cross_entropy, x, y, progress=False)
    assert [layer.name for layer in report] == ["first", "second", "last"]
    assert "Layer unused took no part" in str(report) and "Layer unused took no part" in report.to_markdown()
    with pytest.raises(ValueError, match="Layer unused took no part"):
        function(model, cross_entropy, x, y, ["unused"], progress=False)
    none = nn.Sequential(nn.Tanh())
    none.unused = nn.Linear(2, 2)
    none.forward = torch.tanh
    with pytest.raises(ValueError, match="Layer unused took no part"):
        function(none, lambda z, y: z.mean(), x, y, progress=False)


def test_a_tracker_refuses_before_training() -> None:
    model, x, y = residual(nn.Tanh())
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0)
    with pytest.raises(ValueError, match="no layer 'typo'"):
        track_curvature(optimizer, model, cross_entropy, x, y, ["typo"])
    with pytest.raises(MemoryError, match="raise memory_budget"):
        track_curvature(optimizer, model, cross_entropy, x, y, ["last"], memory_budget=1000)
    with pytest.raises(ValueError, match="steps=2.0: give an integer"):
        track_curvature(optimizer, model, cross_entropy, x, y, steps=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damping=-1"):
        track_curvature(optimizer, model, cross_entropy, x, y, damping=-1)
    tracker = track_curvature(optimizer, model, cross_entropy, x, y, (name for name in ["last"]), steps=1)  # type: ignore[arg-type]
    for _ in range(2):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
        tracker()
    assert len(tracker.reports) == 2


def test_a_ladder_of_hours_is_not_begun_unasked() -> None:
    """With BatchNorm in training mode each datum needs products of its own; the numbers are those that then run."""
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(216, 2))
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 2
    number, alone = 2 * 32 * 36 * 6 + 60 + 2 * 2 + 434, 2 * 36 * 6 + 60 + 2 * 2 + 434  # the last layer's data are apart
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for function in (
        lambda: curvature_ladder(model, cross_entropy, x, y, progress=False),
        lambda: track_curvature(optimizer, model, cross_entropy, x, y, name="o"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=f"{number:,} products") as error:
            function()
        for part in (
            "0 13,884",
            "4 438",
            "layers=['0']",
            "estimate_curvature",
            f"model.eval(), if that is why, it takes {alone:,}",
        ):
            assert part in str(error.value)
    assert len(curvature_ladder(model, cross_entropy, x, y, ["4"], progress=False)) == 1


def test_the_number_of_products_is_that_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they run, for independent and for coupled data; few are no reason to refuse."""
    ladder = sys.modules["kfqn_ext.curvature.ladder"]
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    x, y, run = torch.rand(5, 1, 3, 3), torch.arange(5) % 2, [0]
    for name in ("HessianProduct.full", "OutputHessian.__call__", "OutputGGN.__call__"):
        kind, method = name.split(".")
        owner = getattr(sys.modules["kfqn_ext.curvature.products"], kind)
        monkeypatch.setattr(owner, method, counted(getattr(owner, method), run))
    for training in (False, True):
        model.train(training)
        monkeypatch.setattr(ladder, "_PRODUCTS", 10_000)
        run[0] = 0
        assert len(curvature_ladder(model, cross_entropy, x, y, progress=False)) == 2
        probes = 3 if training else 4  # whether data are coupled, for two layers' Hessian and Gauss-Newton matrix
        monkeypatch.setattr(ladder, "_PRODUCTS", 0)
        with pytest.raises(ValueError, match=f"takes {run[0] - probes} products"):
            curvature_ladder(model, cross_entropy, x, y, progress=False)


def counted(method: Any, run: list[int]) -> Any:
    def call(*args: Any) -> Any:
        run[0] += 1
        return method(*args)

    return call
