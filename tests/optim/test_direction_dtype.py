"""``direction_dtype``: the direction comes from rounded copies of the inverses, which themselves stay as precise."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner import rounded
from tests.optim.family import FAMILY, rows

COMMON: dict[str, Any] = {"lr": 0.1, "damping": 1.0}
each = pytest.mark.parametrize("name", rows(lambda member: member.takes("direction_dtype")))


def make(name: str, model: nn.Module, **options: Any) -> Any:
    """With some steps between updates, of what is learned as of what is recomputed."""
    if FAMILY[name].takes("inverse_update_freq"):
        options["inverse_update_freq"] = 2
    return FAMILY[name].make(model, **COMMON, T=1 if FAMILY[name].learns_first else 2, **options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3))


def batch(model: nn.Module, k: int) -> Minibatch:
    x = torch.randn(16, 2, 5, 5, generator=torch.Generator().manual_seed(k))
    return Minibatch(model, F.cross_entropy, x, torch.arange(16) % 3)


def inverses(optimizer: Any) -> list[dict[str, Tensor]]:
    states = [block.state for block in optimizer._blocks()]
    return [{key: state[key].clone() for key in ("H_A", "H_G") if key in state} for state in states]


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@each
def test_one_direction_differs_by_rounding_alone(name: str) -> None:
    """Entry by entry, at most what rounding H_A, M, M H_A, H_G and the result by 2⁻⁹ each can do to |H_G| |M| |H_A|."""
    model = net()
    optimizer = make(name, model)
    for k in range(3):
        optimizer.step(batch(model, k))
    for block in optimizer._blocks():
        state = block.state
        exact = blocks.precondition(state, optimizer.recipe, state["momentum"])
        view = optimizer._preconditioner._rounded.view(block.layer.weight, state, torch.bfloat16)
        error = (blocks.precondition(view, optimizer.recipe, state["momentum"]) - exact).abs()
        H_A, H_G = optimizer.inverses(block.layer.weight).dense()
        size = H_G.abs() @ state["momentum"].abs() @ H_A.abs()
        assert (error <= 5 * 2**-9 * (1 + 2**-6) * size).all()
        assert bool(error.max() > 0) == bool(state.keys() & {"H_A", "H_G"})  # pairs are not rounded


@each
def test_inverses_are_learned_in_their_own_precision(name: str) -> None:
    """The first update comes before any rounded step could tell: equal states, in float32, bit for bit.

    But for what is learned from the direction itself.
    """
    states = []
    for dtype in (None, torch.bfloat16):
        model = net()
        optimizer = make(name, model, direction_dtype=dtype)
        optimizer.step(batch(model, 0))
        states.append({k: v for k, v in optimizer.state[model[0].weight].items() if k not in ("momentum", "u")})
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert value.dtype == states[1][key].dtype and torch.equal(value, states[1][key]), key


@each
def test_copies_are_never_stale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After updates in place, refreshed inverses, a state that was loaded, and one that somebody wrote to."""
    model = net()
    optimizer = make(name, model, direction_dtype=torch.bfloat16)
    seen: list[dict[str, Tensor]] = []
    precondition = blocks.precondition

    def watch(state: Any, recipe: Any, M: Tensor) -> Tensor:
        seen.append({key: state[key].clone() for key in ("H_A", "H_G") if key in state})
        return precondition(state, recipe, M)

    monkeypatch.setattr(blocks, "precondition", watch)
    checked = 0
    for k in range(8):
        if k == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        if k == 6:
            for H in optimizer.state[model[0].weight].keys() & {"H_A", "H_G"}:
                optimizer.state[model[0].weight][H].mul_(2.0)
        before = inverses(optimizer)
        seen.clear()
        optimizer.step(batch(model, k))
        if k == 0 or FAMILY[name].learns_first:  # made, or computed again, before the direction
            before = inverses(optimizer)
        if k == 0:
            continue
        for state, expected in zip(seen, before, strict=True):
            for key, H in expected.items():
                assert state[key].dtype == torch.bfloat16 and torch.equal(state[key], H.bfloat16()), (k, key)
                checked += 1
    assert checked == 7 * sum(map(len, inverses(optimizer)))


def test_a_direction_in_the_inverses_dtype_is_the_default() -> None:
    plain, same = net(), net()
    for model, dtype in ((plain, None), (same, torch.float32)):
        optimizer = KBFGS.as_printed(model, direction_dtype=dtype, **COMMON)
        for k in range(3):
            optimizer.step(batch(model, k))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), same.parameters(), strict=True))


def test_it_can_be_chosen_by_group() -> None:
    """A layer whose group asks for nothing keeps the exact direction."""
    results = []
    for dtype in (None, torch.bfloat16):
        model = net()
        groups = [
            {"params": list(model[0].parameters()), "direction_dtype": dtype},
            {"params": list(model[3].parameters())},
        ]
        optimizer = KBFGS.as_printed(model, groups, **COMMON)
        optimizer.step(batch(model, 0))
        results.append(parameters(model))
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, "bfloat16"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="direction_dtype"):
        KBFGS.as_printed(net(), direction_dtype=dtype, **COMMON)


def test_training_is_as_good() -> None:
    """Forty steps on the digits: the same loss within a few percent, where plain momentum is far behind."""
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(v) for v in load_digits(return_X_y=True))
    x = (x.float() / 16).unflatten(1, (1, 8, 8))
    losses = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
        )
        optimizer = KBFGS.as_printed(model, lr=0.3, damping=3.0, direction_dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            part = torch.randint(len(x), (256,), generator=generator)
            optimizer.step(Minibatch(model, F.cross_entropy, x[part], y[part]))
        losses.append(float(F.cross_entropy(model(x), y).detach()))
    assert losses[0] < 0.5 and abs(losses[1] - losses[0]) < 0.1 * losses[0], losses


# ------------------------------------------------------------------ devices without arithmetic for it


@each
def test_a_device_that_is_slower_takes_the_inverses_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; parameters and state are those of a run that has not asked for it, and load where it is fast."""
    monkeypatch.setattr(rounded, "multiplies_bfloat16", lambda device: device.type != "cpu")
    results = []
    for dtype in (None, torch.bfloat16):
        model = net()
        optimizer = make(name, model, direction_dtype=dtype)
        with pytest.warns(UserWarning, match="no arithmetic for it") if dtype else nullcontext() as said:
            for k in range(3):
                torch.manual_seed(k)
                optimizer.step(batch(model, k))
        assert said is None or sum("bfloat16" in str(w.message) for w in said) == 1
        results.append((parameters(model), optimizer.state_dict()))
    (exact, saved), (found, state) = results
    assert all(torch.equal(p, q) for p, q in zip(exact, found, strict=True))
    for key, values in saved["state"].items():
        assert values.keys() == state["state"][key].keys()
        assert all(torch.equal(value, state["state"][key][k]) for k, value in values.items())
    monkeypatch.setattr(rounded, "multiplies_bfloat16", lambda device: True)
    model = net()
    resumed = make(name, model, direction_dtype=torch.bfloat16)
    resumed.step(batch(model, 0))
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["direction_dtype"] == torch.bfloat16
    resumed.step(batch(model, 3))


def test_float64_inverses_are_not_rounded_to_float32_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "multiplies_bfloat16", lambda device: False)
    model = net().double()
    optimizer = make("KBFGS", model, direction_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="direction_dtype=None"):
        for k in range(2):
            minibatch = batch(model, k)
            optimizer.step(Minibatch(model, F.cross_entropy, minibatch.x.double(), minibatch.y))
    block = optimizer._blocks()[0]
    view = optimizer._preconditioner._rounded.view(block.layer.weight, block.state, torch.bfloat16)
    assert view is block.state


ASK = """
import time, torch
from kfqn_ext._torch import multiplies_bfloat16
torch.set_num_threads(1)
times = []
for dtype in (torch.float32, torch.bfloat16):
    A = torch.randn(256, 256).to(dtype)
    def product():
        begin = time.process_time()
        A @ A
        return time.process_time() - begin
    product()
    times.append(min(product() for _ in range(5)))
print(multiplies_bfloat16(torch.device("cpu")), times[1] < 10 * times[0])
"""


@pytest.mark.parametrize("instructions", ["", "AVX2"])
def test_the_answer_is_that_of_a_clock(instructions: str) -> None:
    """Of this processor, and of one that has no wider instructions than AVX2: 48 times as long as in float32."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    run = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    answer, fast = run.stdout.split()
    assert fast == "True" or answer == "False"
    assert not (instructions and platform.machine() == "x86_64") or answer == "False"
