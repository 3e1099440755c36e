"""Every number of every row of the ladder, computed again from matrices of the whole layer by its definition."""

import copy
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import Row, curvature_ladder, exact_block, exact_ggn_block, exact_output_hessians
from tests import reference as ref
from tests.curvature.nets import CLASSES, F64, N, residual

LAMBDA = 0.3
HELD = "KBFGS: H_A⁻¹ ⊗ H_G⁻¹"


def whole(blocks: Tensor) -> Tensor:
    """[p, p], or channel groups [G, p, p] on the diagonal of one matrix."""
    return torch.block_diag(*blocks) if blocks.ndim == 3 else blocks


def kron(A: Tensor, G: Tensor) -> Tensor:
    return torch.stack([torch.kron(*pair) for pair in zip(A, G, strict=True)]) if A.ndim == 3 else torch.kron(A, G)


def plus(M: Tensor, damping: float) -> Tensor:
    return M + damping * torch.eye(M.shape[-1], dtype=F64)


def nearest(M: Tensor, d_out: int) -> Tensor:
    """The best product by a singular value decomposition of the rearranged block."""
    if M.ndim == 3:
        return torch.stack([nearest(block, d_out) for block in M])
    d = len(M) // d_out
    R = M.reshape(d, d_out, d, d_out).transpose(1, 2).reshape(d * d, d_out**2)
    U, s, V = torch.linalg.svd(R, full_matrices=False)
    return s[0] * torch.kron(U[:, 0].reshape(d, d), V[0].reshape(d_out, d_out))


def by_location(a: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """``eq_{1.5}`` and ``eq_2.5``, one Kronecker product at a time; [N, T, *B, d_in] and [N, T, *B, d_out, d_out]."""
    T = a.shape[1]
    outer = a.unsqueeze(-1) * a.unsqueeze(-2)
    apart: Any = sum(kron(outer[n, t], G[n, t]) for n in range(N) for t in range(T))
    by_datum: Any = sum(kron(outer[n].sum(0), G[n].mean(0)) for n in range(N))
    return apart / N, by_datum / N


def expected_gamma(model: nn.Module, x: Tensor, layer: str) -> Tensor:
    """Γ for each target, weighted with the probability that the model gives it."""
    p, Gamma = torch.softmax(model(x), -1).detach(), torch.zeros(())
    for n in range(N):
        for c in range(CLASSES):
            one = ref.capture(copy.deepcopy(model), cross_entropy, x[n : n + 1], torch.tensor([c]))
            Gamma = Gamma + p[n, c] * one.layers[layer].Gamma / N
    return Gamma


def factors(model: nn.Module, x: Tensor, y: Tensor, layer: str, state: Any) -> dict[str, Tensor]:
    """A, G and what the optimizer holds and aims at, with ``algo_8``'s split of λ."""
    a = ref.capture(copy.deepcopy(model), cross_entropy, x, y).layers[layer].a
    G_tt = exact_output_hessians(model, cross_entropy, x, y, layer).diagonal(dim1=1, dim2=2).movedim(-1, 1)
    A, G, T = torch.einsum("nt...j,nt...k->...jk", a, a) / N, G_tt.mean((0, 1)), a.shape[1]
    A_plus, G_plus = plus(A, math.sqrt(LAMBDA * T)), plus(G, math.sqrt(LAMBDA / T))
    apart, by_datum = by_location(a, G_tt)
    start = torch.eye(G.shape[-1], dtype=F64).expand_as(G) / math.sqrt(LAMBDA / T)
    held = {"H_A": state["H_A"], "H_G": state["H_G"], "start_G": start}
    return {"A": A, "G": G, "A_plus": A_plus, "G_plus": G_plus, "apart": apart, "by_datum": by_datum, **held}


def rungs(model: nn.Module, x: Tensor, y: Tensor, layer: str, f: dict[str, Tensor]) -> dict[str, Tensor]:
    B = exact_block(model, cross_entropy, x, y, layer)
    matrices = {
        "exact block": B,
        "Σ A_tt' ⊗ G_tt'": B,
        "uncorrelated locations": f["apart"],
        "one product per datum": f["by_datum"],
        "A ⊗ G": kron(f["A"], f["G"]),
        "(A + λ_A I) ⊗ (G + λ_G I)": kron(f["A_plus"], f["G_plus"]),
        HELD: torch.linalg.inv(kron(f["H_A"], f["H_G"])),
        "λ I (gradient descent)": LAMBDA * torch.eye(B.shape[-1], dtype=F64).expand_as(B),
        "Gauss-Newton": exact_ggn_block(model, cross_entropy, x, y, layer),
        "Ω ⊗ Γ": kron(f["A"], expected_gamma(model, x, layer)),
        "nearest Kronecker product": nearest(B, f["G"].shape[-1]),
    }
    return {name: whole(M) for name, M in matrices.items()}


def relative(M: Tensor, target: Tensor) -> float:
    return float((M - target).norm() / target.norm())


def gain(g: Tensor, d: Tensor, B: Tensor) -> float:
    slope, bend = float(g @ d), float(d @ B @ d)
    return 0.0 if slope <= 0 else slope**2 / (2 * bend) if bend > 0 else math.inf


def shape_numbers(M: Tensor, B: Tensor, damped: bool) -> dict[str, float]:
    """What a row says about the matrix."""
    values, B_plus = torch.linalg.eigvalsh(M), plus(B, LAMBDA)
    return {
        "error": relative(M, B),
        "spectral_error": float(torch.linalg.matrix_norm(M - B, 2) / torch.linalg.matrix_norm(B, 2)),
        "cosine": float((M * B).sum() / (M.norm() * B.norm())),
        "damped_error": float((M - (B_plus if damped else B)).norm() / B_plus.norm()),
        "negative_mass": float(-values[values < 0].sum() / values.abs().sum()),
        "lowest": float(values[0]),
        "highest": float(values[-1]),
        "damping": LAMBDA,
    }


def direction_numbers(M: Tensor, B: Tensor, g: Tensor, damped: bool) -> dict[str, float]:
    """What a row says about the direction."""
    B_plus = plus(B, LAMBDA)
    newton, d = torch.linalg.solve(B_plus, g), torch.linalg.solve(M if damped else plus(M, LAMBDA), g)
    cosine = float(newton @ d / (newton.norm() * d.norm()))
    return {
        "angle": math.degrees(math.acos(max(-1.0, min(1.0, cosine)))),
        "decrease": gain(g, d, B),
        "share": gain(g, d, B_plus) / gain(g, newton, B_plus),
    }


def inverse_numbers(name: str, M: Tensor, B: Tensor, f: dict[str, Tensor]) -> dict[str, float]:
    """What a row says about the inverse of a rung that contains λ."""
    H, inv = torch.linalg.inv(M), torch.linalg.inv
    AG = whole(kron(f["A"], f["G"]))
    numbers = {"H_error": relative(H, inv(plus(AG, LAMBDA))), "H_exact_error": relative(H, inv(plus(B, LAMBDA)))}
    if name != HELD:
        return numbers
    aim_A, aim_G = inv(f["A_plus"]), inv(f["G_plus"])
    return {
        **numbers,
        "H_A_error": relative(f["H_A"], aim_A),
        "H_G_error": relative(f["H_G"], aim_G),
        "start_G_error": relative(f["start_G"], aim_G),
        "H_aim_error": relative(H, whole(kron(aim_A, aim_G))),
    }


@pytest.mark.parametrize(("layer", "groups"), [("second", 2), ("second", 1), ("last", 1)])
def test_every_number_of_every_row(layer: str, groups: int) -> None:
    model, x, y = residual(nn.Tanh(), groups=groups)
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=LAMBDA, curvature_update_freq=1)
    for _ in range(5):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    module: Any = model.get_submodule(layer)
    report = curvature_ladder(model, cross_entropy, x, y, [layer], optimizer, progress=False)
    f = factors(model, x, y, layer, optimizer.state[module.weight])
    matrices = rungs(model, x, y, layer, f)
    g = ref.as_matrix(module, *torch.autograd.grad(cross_entropy(model(x), y), [module.weight, module.bias]))
    g, B = g.mT.flatten(), matrices["exact block"]
    assert [row.rung for row in report[layer].rows] == list(matrices)
    assert float(torch.linalg.eigvalsh(B)[0]) + LAMBDA > 0  # shares are numbers
    for row in report[layer].rows:
        M, damped = matrices[row.rung], row.rung in (HELD, "(A + λ_A I) ⊗ (G + λ_G I)", "λ I (gradient descent)")
        expected = {**shape_numbers(M, B, damped), **direction_numbers(M, B, g, damped)}
        expected |= inverse_numbers(row.rung, M, B, f) if damped else {}
        for name in (field.name for field in fields(Row) if field.name not in ("rung", "label")):
            found, target = getattr(row, name), expected.get(name, math.nan)
            both_none = math.isnan(found) and math.isnan(target)
            tolerance = 1e-4 if name == "angle" else 1e-9  # an arc cosine near 1
            assert both_none or math.isclose(found, target, rel_tol=1e-6, abs_tol=tolerance), (row.rung, name, target)
