"""The Gauss-Newton rung is the Gauss-Newton block whatever the loss and the output's shape, and Γ fits to it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext.curvature import curvature_ladder, estimate_curvature, exact_block, exact_ggn_block
from tests.curvature.nets import CLASSES, F64


class Tokens(nn.Module):
    """A network by token whose output is [N, T, K], or that with the tokens of all data in one row after the other."""

    def __init__(self, arrange: Any = lambda z: z) -> None:
        super().__init__()
        self.a, self.b, self.arrange = nn.Linear(3, 4), nn.Linear(4, CLASSES), arrange

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.arrange(self.b(torch.tanh(self.a(x))))
        return z


def by_token(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z.flatten(0, -2), y.flatten())


def tokens(arrange: Any, y_of: Any = lambda y: y) -> tuple[nn.Module, Any, Tensor, Any]:
    torch.manual_seed(0)
    model, x, y = Tokens(arrange).double(), torch.rand(4, 5, 3, dtype=F64), torch.randint(CLASSES, (4, 5))
    return model, by_token, x, y_of(y)


def chain(loss_fn: Any) -> tuple[nn.Module, Any, Tensor, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, CLASSES)}).double()

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = model["a"], model["b"]

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    return Chain(), loss_fn, torch.rand(6, 3, dtype=F64), None


CASES: dict[str, Any] = {
    "rows of tokens": lambda: tokens(lambda z: z),
    "flattened": lambda: tokens(lambda z: z.flatten(0, 1)),
    "flattened, tokens first": lambda: tokens(lambda z: z.transpose(0, 1).flatten(0, 1), lambda y: y.T),
    "channels first": lambda: (tokens(lambda z: z.mT)[0], cross_entropy, *tokens(None)[2:]),
    "not convex": lambda: chain(lambda z, y: torch.sin(6 * z).mean()),
    "contrastive": lambda: chain(lambda z, y: (z @ z.T).logsumexp(-1).mean()),
}


def reference_error(case: Any, layer: str) -> float:
    B, GGN = (form(*case, layer) for form in (exact_block, exact_ggn_block))
    return float((GGN - B).norm() / B.norm())


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("name", CASES)
def test_ladder(name: str, layer: str) -> None:
    case = CASES[name]()
    report = curvature_ladder(*case, [layer], progress=False)
    assert abs(report[layer, "Gauss-Newton"].error - reference_error(case, layer)) < 1e-9
    text = str(report)
    assert ("not convex" in text) == (report[layer, "Gauss-Newton"].lowest < -1e-9)
    assert ("depends on other data" in text) == (name == "contrastive")
    if layer == "b":  # z is linear in it: G = Γ
        assert abs(report["b", "A ⊗ G"].error - report["b", "Ω ⊗ Γ"].error) < 1e-9


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("name", CASES)
def test_estimate(name: str, layer: str) -> None:
    """Its Gauss-Newton rung, Γ and floor are right or left out with a note."""
    case = CASES[name]()
    exact = curvature_ladder(*case, [layer], progress=False)
    report = estimate_curvature(*case, [layer], probes=200, progress=False)
    if name in ("contrastive", "flattened, tokens first"):
        assert (
            "is not one of" in str(report) and "Ω" not in str(report) and "Gauss-Newton" not in report[0].rows[-1].rung
        )
        return
    for rung in ("Gauss-Newton", "Ω ⊗ Γ"):
        row, target = report[layer, rung], exact[layer, rung]
        assert abs(row.error - target.error) < 4 * row.error_se + 1e-6
        assert abs(row.lowest - target.lowest) < 0.02 * target.highest
        assert abs(row.highest - target.highest) < 0.02 * target.highest
    if layer == "b":  # Gauss-Newton is the exact block, whose floor this is
        row, floor = report[0].rows[-1], exact[0].rows[-1]
        assert abs(row.error - floor.error) < 4 * row.error_se + 1e-6
        assert abs(row.highest - floor.highest) < 1e-3 * abs(floor.highest)
    assert ("not convex" in str(report)) == (name == "not convex")
