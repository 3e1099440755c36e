"""State meets parameters: of another shape, another dtype, and what a warm start makes of bad data."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS, splits
from kfqn_ext.optim.inverses import ScaledIdentity
from tests.cases import assert_close
from tests.optim.family import FAMILY, rows

F64 = torch.float64
X, Y = torch.randn(12, 2, 5, 5, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


each = pytest.mark.parametrize("name", FAMILY)


def net(dtype: torch.dtype, width: int = 4) -> nn.Sequential:
    """With channel groups, and a LayerNorm whose parameters have no block."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, width, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(9 * width), nn.Linear(9 * width, 3)
    ).to(dtype)


def train(model: nn.Sequential, optimizer: Any, steps: int = 3) -> Tensor:
    for _ in range(steps):
        torch.manual_seed(0)  # of targets that are sampled
        loss = optimizer.step(Minibatch(model, F.cross_entropy, X.to(model[0].weight.dtype), Y))
    return loss


def warm(model: nn.Sequential, optimizer: Any) -> None:
    """With sampled targets where curvature starts from Γ, and with a backward pass where the damping does."""
    recipe = optimizer.recipe

    def forward(x: Tensor) -> None:
        minibatch = Minibatch(model, F.cross_entropy, x, Y)
        minibatch.sampled(0) if recipe.second_pass.sampled else minibatch()

    needed = recipe.second_pass.sampled or splits.reads_traces(recipe.split)  # by some; it harms none
    optimizer.warm_start([X.to(model[0].weight.dtype)], forward if needed else None, progress=False)


def trained(name: str, dtype: torch.dtype, start: Any = train) -> tuple[nn.Sequential, Any]:
    model = net(dtype)
    optimizer = FAMILY[name].make(model, lr=0.05)
    start(model, optimizer)
    return model, optimizer


def dtypes(optimizer: Any) -> set[torch.dtype]:
    values = [v for state in optimizer.state.values() for key, v in state.items() if key != "num_locations"]
    return {v.dtype for v in values if v.is_floating_point()}


# ------------------------------------------------------------------ dtypes


@each
@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, F64), (F64, torch.float32), (F64, torch.bfloat16)])
def test_state_of_another_dtype(name: str, saved: torch.dtype, loaded: torch.dtype) -> None:
    """Cast to what the state of these parameters is kept in, and the run goes on; what was saved stays."""
    _, optimizer = trained(name, saved)
    state, model = optimizer.state_dict(), net(loaded)
    kept = copy.deepcopy(state)
    other = FAMILY[name].make(model, lr=0.05)
    other.load_state_dict(state)
    assert dtypes(other) == {torch.promote_types(loaded, torch.float32)}
    counters = {v.dtype for s in other.state.values() for key, v in s.items() if key.startswith("pairs_seen")}
    assert counters <= {torch.int64}
    assert torch.isfinite(train(model, other))
    assert dtypes(other) == {torch.promote_types(loaded, torch.float32)}
    for i, entry in kept["state"].items():
        assert all(torch.equal(value, state["state"][i][key]) for key, value in entry.items())


@each
def test_a_run_in_float64_goes_on_from_float32(name: str) -> None:
    """As the run that stays in float32, up to its rounding."""
    model, optimizer = trained(name, torch.float32)
    twin = net(F64)
    twin.load_state_dict(model.state_dict())
    other = FAMILY[name].make(twin, lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    train(twin, other)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.detach().double(), q.detach(), 1e-3)


@each
@pytest.mark.parametrize("start", [train, warm])
def test_a_model_that_changes_its_dtype_between_steps(name: str, start: Any) -> None:
    model, optimizer = trained(name, torch.float32, start)
    for dtype in (F64, torch.float32):
        model.to(dtype)
        assert torch.isfinite(train(model, optimizer))
        assert dtypes(optimizer) == {dtype}


# ------------------------------------------------------------------ shapes


@each
@pytest.mark.parametrize("start", [train, warm])
def test_state_of_another_model_is_refused(name: str, start: Any) -> None:
    """Also where it has never taken a step, and no momentum: everything that a layer keeps is compared."""
    _, optimizer = trained(name, torch.float32, start)
    saved = optimizer.state_dict()
    others = net(torch.float32, width=6)
    for entry in saved["state"].values():
        entry.pop("momentum", None)
    other = FAMILY[name].make(others, lr=0.05)
    # The first layer differs in its outputs, of which a multiple of the identity says nothing.
    found = 4 if isinstance(other.recipe.output_inverse, ScaledIdentity) else 0
    with pytest.raises(ValueError, match=rf"The state has a \w+ of shape .* needs .*layer {found}.* another model's"):
        other.load_state_dict(saved)
    assert not other.state
    train(others, other)


@each
def test_every_tensor_of_the_state_is_compared(name: str) -> None:
    model, optimizer = trained(name, torch.float32)
    saved = optimizer.state_dict()
    for i, entry in saved["state"].items():
        for key, value in entry.items():
            wrong = copy.deepcopy(saved)
            wrong["state"][i][key] = value.new_zeros(*value.shape, 1)
            with pytest.raises(ValueError, match=f"The state has a {key} of shape"):
                optimizer.load_state_dict(wrong)
    optimizer.load_state_dict(saved)
    train(model, optimizer)


@pytest.mark.parametrize("sizes", [(100, 5), (5, 100), (3, 2)])
@pytest.mark.parametrize("name", rows(lambda member: member.limited))
def test_another_history_size_is_refused(name: str, sizes: tuple[int, int]) -> None:
    model = net(torch.float32)
    optimizer, other = (FAMILY[name].with_memory(p).make(model, lr=0.05) for p in sizes)
    train(model, optimizer)
    with pytest.raises(
        ValueError, match=rf"pairs_\w of shape .*{2 * sizes[0]}, .* needs .*{2 * sizes[1]}, .*history_size"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


# ------------------------------------------------------------------ a warm start on bad data


def test_a_warm_start_on_bad_data_says_so() -> None:
    """By the layers' names; the curvature starts from the first minibatch, as without it."""
    model, twin = net(torch.float32), net(torch.float32)
    optimizer, other = KBFGS.as_printed(model, lr=0.05), KBFGS.as_printed(twin, lr=0.05)
    bad = X.float().clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.warns(UserWarning, match="warm_start: what layer .* saw is not finite") as said:
        optimizer.warm_start([X.float(), bad], progress=False)
    assert {str(w.message).split()[3] for w in said} == {"0", "4"}
    assert not optimizer.state
    train(model, optimizer)
    train(twin, other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_warm_start_on_bad_data_keeps_what_was_learned() -> None:
    model, optimizer = trained("KBFGS", torch.float32)
    before = {(p, key): value.clone() for p, state in optimizer.state.items() for key, value in state.items()}
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.warm_start([X.float() * float("nan")], progress=False)
    assert all(torch.equal(optimizer.state[p][key], value) for (p, key), value in before.items())


def test_a_recipe_without_a_side_that_keeps_state_loads_too() -> None:
    model = net(torch.float32)
    optimizer = FAMILY["L-BFGS for H_A"].with_memory(50).make(model, lr=0.05)
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)


def test_the_state_of_a_bias_follows_it_where_the_layer_has_no_curvature() -> None:
    """A layer that is not called as one: its momentum is the weight's, and what else moves the bias its own."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(50, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.first(x.flatten(1)), self.last.weight, self.last.bias)

    model = Functional()
    optimizer = OnePassKBFGS(model)
    for dtype in (torch.float32, F64):
        model.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the layer is not measured
            optimizer.step(Minibatch(model, F.cross_entropy, X.to(dtype), Y))
    assert "exp_avg_sq" in optimizer.state[model.last.bias]
    kept = [item for state in optimizer.state.values() for item in state.items()]
    assert {value.dtype for key, value in kept if key != "num_locations" and value.is_floating_point()} == {F64}


def test_of_several_groups_the_message_names_the_layout_that_does_not_fit() -> None:
    model = net(torch.float32)
    optimizer = KBFGS(model, [{"params": part.parameters()} for part in (model[0], model[4])])
    saved = optimizer.state_dict()
    saved["param_groups"][1]["layout"] = "3 Other Rule"
    with pytest.raises(ValueError, match="has the layout '3 Other Rule', and KBFGS reads"):
        optimizer.load_state_dict(saved)
