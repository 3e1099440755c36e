"""The quantities of any network by autograd alone: no hook on an output, nothing from the package.

Each layer of a copy of the model adds a tensor of zeros to its output. The gradient of the zeros is ∂h, whatever the
network does to the output afterwards, in place or not.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities, KFACFactors, extend
from kfqn_ext.geometry import refusal
from tests import reference as ref
from tests.cases import assert_close

Run = Callable[[Any], Tensor]
"""Maps a model to its loss, a mean over data."""


def layers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, ref.LAYERS)}


def watched(model: nn.Module, run: Run) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Each layer's calls that the loss depends on: input, and gradient by the output."""
    twin: Any = copy.deepcopy(model)
    calls: list[tuple[str, Tensor, Tensor]] = []

    def record(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def call(input: Tensor) -> Tensor:
            x, h = input.detach().clone(), forward(input)
            zeros = torch.zeros_like(h, requires_grad=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                calls.append((name, x, zeros))
            return h + zeros

        return call

    for name, module in layers(twin).items():
        module.forward = record(name, module.forward)
    loss = run(twin)
    seen = list(calls)  # checkpointing calls layers again in the backward pass
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    grads = torch.autograd.grad(loss, [zeros for _, _, zeros in seen], allow_unused=True) if seen else ()
    for (name, x, _), g in zip(seen, grads, strict=True):
        if g is not None:
            found.setdefault(name, []).append((x, g))
    return found


def check_layer(module: Any, calls: list[tuple[Tensor, Tensor]], q: Any, f: Any, tol: float) -> None:
    """Compare moments and Kronecker factors with explicit sums over all patches of all calls."""
    a = [ref.patches(module, x.double()) for x, _ in calls]
    g = [ref.outputs(module, v.double()) for _, v in calls]
    N, NT = sum(v.shape[0] for v in a), sum(v.shape[0] * v.shape[1] for v in a)
    T = NT / N
    rows, grads = (torch.cat([v.flatten(0, 1) for v in values]) for values in (a, g))  # [n t, *B, d]
    assert q.num_data == f.num_data == N and abs(q.num_locations - T) < 1e-9 and abs(f.num_locations - T) < 1e-9
    W = ref.weight_matrix(module).double()
    size = rows.abs().mean(0)
    assert_close(q.a_bar, rows.mean(0), tol, size)
    assert_close(q.h_bar, torch.einsum("...ij,...j->...i", W, rows.mean(0)), tol, (W.abs() @ size.unsqueeze(-1)))
    assert_close(q.dh_bar, grads.sum(0) / T, tol, grads.abs().sum(0) / T)
    A = torch.einsum("r...i,r...j->...ij", rows, rows) / N
    s = torch.linspace(-1, 1, A.shape[-1], dtype=q.a_bar.dtype).expand(A.shape[:-1]).contiguous()
    assert_close(q.A @ s, (A @ s.double().unsqueeze(-1)).squeeze(-1), tol, A.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert_close(f.Omega, A, tol)
    assert_close(f.Gamma, torch.einsum("r...i,r...j->...ij", grads, grads) * (N * N / NT), tol)


def check(model: nn.Module, run: Run, tol: float = 1e-10) -> set[str]:
    """Compare every layer that can be measured; return their names. Others must have a reason, and no result."""
    rng = torch.get_rng_state()
    want = watched(model, run)
    torch.set_rng_state(rng)
    moments, factors = KBFGSQuantities(), KFACFactors()
    extend(model)
    model.zero_grad()
    with backpack(moments, factors):
        run(model).backward()
    measured = set()
    for name, module in layers(model).items():
        if module not in moments:
            unreachable = name not in want or not module.weight.requires_grad
            assert unreachable or refusal(module) is not None, f"{name} was passed over without a reason"
            continue
        try:
            check_layer(module, want[name], moments[module], factors[module], tol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        measured.add(name)
    return measured
