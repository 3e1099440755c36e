"""What a stranger adds without touching the package: a layer, a rule for an inverse, a quantity, a split, a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any, ClassVar, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.extensions import LayerExtension
from kfqn_ext.extensions.pooling import DATA, over
from kfqn_ext.geometry import LayerPass
from kfqn_ext.linalg.splits import Balance, needs_traces, spatial, trace
from kfqn_ext.optim import KBFGS, KroneckerOptimizer, Minibatch
from kfqn_ext.optim.inverses import InputInverse, Measured, ScaledIdentity, Seen, State
from kfqn_ext.optim.recipe import Recipe, SecondPass
from tests.cases import assert_close
from tests.geometry.outsider import Transposed, taught
from tests.optim.family import FAMILY

F64 = torch.float64

# ------------------------------------------------------------------ a layer


@pytest.mark.parametrize("row", FAMILY)
@taught()
def test_a_layer_with_a_transposed_weight_trains_as_its_twin(row: str) -> None:
    """Two of them, of which one sees sequences, beside the same network of nn.Linear."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Transposed(4, 6), nn.Tanh(), nn.Flatten(), Transposed(12, 3)).double()
    twin: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    with torch.no_grad():
        for i in (0, 3):
            model[i].weight.div_(model[i].weight.shape[0] ** 0.5)
            twin[i].weight.copy_(model[i].weight.T)
            twin[i].bias.copy_(model[i].bias)
    options = FAMILY[row].taken(weight_decay=1e-2)
    optimizers = [FAMILY[row].make(m, lr=0.05, damping=0.5, **options) for m in (model, twin)]
    for k in range(5):
        x = torch.randn(8, 2, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            torch.manual_seed(k)
            optimizer.step(Minibatch(m, F.cross_entropy, x, torch.arange(8) % 3))
    for i in (0, 3):
        assert_close(model[i].weight.detach().T, twin[i].weight.detach(), 1e-10)
        assert_close(model[i].bias.detach(), twin[i].bias.detach(), 1e-10)


# ------------------------------------------------------------------ a quantity, and a rule that learns from it


@dataclass(frozen=True)
class Diagonal:
    """diag(A) / d_in."""

    values: Annotated[Tensor, over(DATA)]
    num_data: int
    num_locations: float


class DiagonalOfA(LayerExtension[Diagonal]):
    """diag(A) of each layer."""

    savefield = "diagonal_of_a"

    def measure(self, module: nn.Module, layer: LayerPass) -> Diagonal:
        values = layer.geometry.patches(layer.x).square().sum((0, 1)) / layer.num_data
        return Diagonal(values, layer.num_data, layer.num_locations)


@dataclass(frozen=True)
class DiagonalInverse(InputInverse):
    """H_A = (diag(A) + λ_A I)⁻¹ of a moving average, inverted again when k is a multiple of T₂."""

    first: ClassVar[Any] = (DiagonalOfA,)
    starts_from: ClassVar[Any] = (DiagonalOfA,)

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:
        state["diagonal"] = measured[DiagonalOfA].values
        self.update_inverse(state, damping)

    def learn(self, states: Sequence[State], seen: Seen, damping: Tensor) -> None:
        for state, measured in zip(states, seen.first, strict=True):
            state["diagonal"] = state["diagonal"].lerp(measured[DiagonalOfA].values, 0.5)

    def update_inverse(self, state: State, damping: Tensor) -> None:
        state["H_A"] = torch.diag(1 / (state["diagonal"] + damping))


@pytest.mark.parametrize(("T", "T2"), [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("one_pass", [True, False])
def test_a_rule_with_a_quantity_of_its_own(one_pass: bool, T: int, T2: int) -> None:
    """It is measured, learned from when k ≡ 0 mod T, and inverted when k ≡ 0 mod T₂: eight steps by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    recipe = replace(KBFGS.recipe_as_printed, input_inverse=DiagonalInverse(), output_inverse=ScaledIdentity())
    if one_pass:
        recipe = replace(recipe, second_pass=SecondPass.NONE)
    options: dict[str, Any] = {"curvature_update_freq": T, "inverse_update_freq": T2, "momentum": 0.0}
    optimizer = KroneckerOptimizer(model, recipe=recipe, lr=0.1, damping=0.25, **options)
    W = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach()
    diagonal = inverse = None
    for k in range(1, 9):
        x = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
        y = torch.arange(6) % 3
        a = torch.cat([x, torch.ones(6, 1, dtype=F64)], 1)
        now = a.square().mean(0)
        if diagonal is None:
            diagonal, inverse = now, 1 / (now + 0.5)
        h = (a @ W.T).requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(h, y), h)
        W = W - 0.1 * (g.T @ a) * inverse / 0.5
        if k % T == 0:
            diagonal = 0.5 * diagonal + 0.5 * now
        if k % T2 == 0:
            inverse = 1 / (diagonal + 0.5)
        optimizer.step(Minibatch(model, F.cross_entropy, x, y))
        assert_close(torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach(), W, 1e-12)


def test_a_rule_that_reads_what_it_has_not_named() -> None:
    with pytest.raises(RuntimeError, match="DiagonalOfA was not measured in this pass: name it in `first`"):
        Measured()[DiagonalOfA]


# ------------------------------------------------------------------ a split


def halved(damping: float, balance: Balance) -> Any:
    return trace(damping / 2, balance)


def train(split: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = KroneckerOptimizer(model, recipe=replace(KBFGS.recipe_as_printed, split=split), lr=0.1, damping=0.5)
    for k in range(4):
        x = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(6) % 3))
    return [p.detach() for p in model.parameters()]


def test_wrappers_of_a_split_that_reads_traces() -> None:
    """``wraps`` hands the declaration on; a partial, a lambda and a function declare it themselves."""
    expected = train(trace)

    @wraps(trace)
    def wrapped(damping: float, balance: Balance) -> Any:
        return trace(damping, balance)

    @needs_traces
    def declared(damping: float, balance: Balance) -> Any:
        return trace(damping, balance)

    for split in (wrapped, declared, needs_traces(partial(trace)), needs_traces(lambda d, b: trace(d, b))):
        assert all(torch.equal(p, q) for p, q in zip(train(split), expected, strict=True))
    assert not torch.equal(train(needs_traces(halved))[0], expected[0])
    assert not torch.equal(train(partial(spatial))[0], expected[0])


@pytest.mark.parametrize("split", [lambda d, b: trace(d, b), partial(trace)], ids=["function", "partial"])
def test_a_wrapper_that_declares_nothing(split: Any) -> None:
    """Noticed before there is an optimizer."""
    with pytest.raises(ValueError, match=r"reads the traces of A and Γ, and nothing measures them.*needs_traces"):
        replace(KBFGS.recipe_as_printed, split=split)


# ------------------------------------------------------------------ a row


@final
class MyRow(KroneckerOptimizer):
    """H_A from a diagonal and no H_G: a class of eight lines."""

    recipe = Recipe(DiagonalInverse(), ScaledIdentity(), second_pass=SecondPass.NONE)

    def __init__(self, model: nn.Module, params: Any = None, *, lr: float = 0.1, **shared: Any) -> None:
        super().__init__(model, params, recipe=self.recipe, lr=lr, damping=1.0, **shared)


def test_a_row_of_ones_own() -> None:
    """It steps, shows its inverses, and its state goes through a checkpoint."""
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (MyRow(model, weight_decay=1e-2) for model in models)
    batches = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(4)]
    for x, y in batches[:2]:
        first.step(Minibatch(models[0], F.cross_entropy, x, y))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(first.state_dict())
    for model, optimizer in zip(models, (first, second), strict=True):
        for x, y in batches[2:]:
            optimizer.step(Minibatch(model, F.cross_entropy, x, y))
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    with pytest.raises(NotImplementedError, match="DiagonalOfA can't make empty state.*class method blank"):
        first._make_empty_state()
    held = first.inverses(models[0][0].weight)
    assert held is not None and held.dense()[0].shape == (5, 5)
    with pytest.raises(TypeError, match=r"MyRow.__init__\(\) got an unexpected keyword argument 'weight_dekay'"):
        MyRow(models[0], weight_dekay=1e-2)
