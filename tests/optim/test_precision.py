"""Reduced precision that torch was allowed for a network reaches neither quantities nor curvature, only directions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import backends, nn

from kfqn_ext import KBFGSQuantities, KFACFactors, extend
from kfqn_ext.geometry import ConvGeometry
from kfqn_ext.linalg import bfgs, bfgs_update_, full_precision, precision
from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.inverses import direct, hessian_action, secant
from kfqn_ext.optim.inverses import lbfgs as limited
from kfqn_ext.optim.preconditioner import block as blocks
from tests.optim.family import FAMILY

SWITCHES = {
    "products on GPUs": backends.cuda.matmul,
    "convolutions on GPUs": backends.cudnn.conv,
    "products on CPUs": backends.mkldnn.matmul,
}


@pytest.fixture(autouse=True)
def reduced() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch.set_float32_matmul_precision(before)


def values() -> dict[str, str]:
    autocast = "bf16" if torch.is_autocast_enabled("cpu") else "ieee"
    return {"autocast": autocast, **{name: switch.fp32_precision for name, switch in SWITCHES.items()}}


REDUCED = {
    "autocast": "bf16",
    "products on GPUs": "tf32",
    "convolutions on GPUs": "tf32",
    "products on CPUs": "bf16",
}


def test_all_switches_are_set_and_set_back() -> None:
    assert values() == REDUCED
    with full_precision():
        assert set(values().values()) == {"ieee"}
        with full_precision():
            assert set(values().values()) == {"ieee"}
        assert set(values().values()) == {"ieee"}
    assert values() == REDUCED
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert values() == REDUCED
    assert torch.get_float32_matmul_precision() == "medium"


def test_switches_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_switches", lambda: (precision._Products(), precision._Convolutions()))
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "medium"
    assert backends.cudnn.allow_tf32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@pytest.mark.parametrize("name", FAMILY)
def test_curvature_is_learned_in_full_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[dict[str, str]]] = {}

    def spy(owner: Any, attribute: str) -> None:
        original = getattr(owner, attribute)

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(attribute, []).append(values())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, noting)

    for owner, attribute in (
        *((hessian_action, "bfgs_updates_each_"), (secant, "bfgs_update_each_"), (secant, "powell_lm")),
        *((hessian_action, "damped_inverse"), (direct, "damped_inverse"), (limited, "push_unit_pair")),
        *((ConvGeometry, "mean_patch"), (ConvGeometry, "gram"), (ConvGeometry, "gram_product")),
    ):
        spy(owner, attribute)
    spy(blocks, "precondition")
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.01)
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(8, 2, 6, 6), torch.arange(8) % 3))
    assert all(at == REDUCED for at in seen.pop("precondition"))
    assert seen
    assert all(set(at.values()) == {"ieee"} for places in seen.values() for at in places), seen
    assert values() == REDUCED


def test_quantities_are_those_of_full_precision() -> None:
    """Of a first layer, whose inputs no product has rounded."""
    results = []
    x = torch.randn(16, 8, 12, 12)
    for setting in ("highest", "medium"):
        torch.set_float32_matmul_precision(setting)
        layer = extend(nn.Conv2d(8, 8, 3))
        with backpack(KBFGSQuantities(), KFACFactors()):
            layer(x).sum().backward()
        q = layer.weight.kbfgs
        results.append((q.a_bar, q.A @ q.a_bar, layer.weight.kfac_factors.Omega))
    for exact, found in zip(*results, strict=True):
        assert torch.equal(exact, found)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def smallest_eigenvalue() -> float:
    """Of H after updates with pairs of a matrix of condition 1e5, which changes with the minibatch."""
    torch.manual_seed(0)
    H, Q = 3 * torch.eye(64), torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    spectrum = torch.logspace(-1, 4, 64, dtype=torch.float64)
    for _ in range(300):
        s = H.double() @ (Q @ (torch.randn(64, dtype=torch.float64) * spectrum.sqrt()))
        y = float(1 + 0.5 * torch.randn(()).abs()) * (Q * spectrum) @ (Q.T @ s) + 0.3 * s
        bfgs_update_(H, s.float(), y.float())
    return float(torch.linalg.eigvalsh(H.double())[0])


@pytest.mark.parametrize(
    ("name", "bits", "definite"), [("float32", 24, True), ("TF32", 11, False), ("bfloat16", 8, False)]
)
def test_why(name: str, bits: int, definite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hy from operands that are rounded as a product in reduced precision rounds them."""

    products = bfgs._products

    def rounded_products(matrices: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return products([rounded(H, bits) for H in matrices], rounded(y, bits))

    monkeypatch.setattr(bfgs, "_products", rounded_products)
    with full_precision():
        assert (smallest_eigenvalue() > 0) == definite
