"""How long steps are: each rule by itself against sums and other optimizers, and in steps of the untuned rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import Minibatch
from kfqn_ext.optim.gate import Gate
from kfqn_ext.optim.lengths import Computed, MatchRMSAdamW, SignalToNoise, Spectral, Step, StepLength
from tests import reference as ref
from tests.cases import assert_close
from tests.optim import untuned_twins as twins
from tests.optim.family import FAMILY, rows

F64 = torch.float64
OPEN, CLOSED = Gate(torch.tensor(True)), Gate(torch.tensor(False))
UNTUNED = rows(lambda member: member.sets_length)


class Layer:
    """A layer's momentum and state, from one gradient to the next; its direction is the momentum."""

    def __init__(self, beta: float = 0.8) -> None:
        self.beta, self.state, self.M = beta, {}, torch.zeros(())

    def step(self, gradient: Tensor) -> Step:
        self.M = self.beta * self.M + gradient
        return Step(self.M, self.M, [gradient[:, :-1].norm(), gradient[:, -1:].norm()], self.beta, self.state)


def scale(rule: StepLength, step: Step, gate: Gate = OPEN) -> float:
    found = rule.scales([step], gate)
    assert found is not None
    return float(found)


def orthogonal(*shape: int) -> Tensor:
    """P with P Pᵀ = I or Pᵀ P = I whose entries bfloat16 holds: a part of a permutation matrix."""
    return torch.eye(max(shape), dtype=F64)[torch.randperm(max(shape))][: shape[0], : shape[1]].contiguous()


# ------------------------------------------------------------------ as other optimizers have it


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (8, 8)])
@pytest.mark.parametrize(("rule", "name"), [(Spectral(), "original"), (MatchRMSAdamW(), "match_rms_adamw")])
def test_an_orthogonal_direction_is_as_long_as_in_muon(rule: StepLength, name: str, shape: tuple[int, int]) -> None:
    """Whose rules are stated for such directions, which it makes; here by iterations that reach them to the bit."""
    P = orthogonal(*shape)
    W = nn.Parameter(torch.zeros(shape))
    W.grad = P.float()
    exact: dict[str, Any] = {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 40, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([W], lr=1.0, weight_decay=0.0, adjust_lr_fn=name, **exact).step()
    assert_close(scale(rule, Layer().step(P)) * P, -W.detach().double(), 1e-6)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 4, 5)])
def test_entries_have_the_root_mean_square_that_was_asked_for(shape: tuple[int, ...]) -> None:
    """Whatever the direction, with channel groups too."""
    P = torch.randn(shape, dtype=F64)
    step = Step(P, P, [P.norm()], 0.8, {})
    for rms in (0.2, 0.5):
        assert float((scale(MatchRMSAdamW(rms), step) * P).square().mean().sqrt()) == pytest.approx(rms)


@pytest.mark.parametrize("rule", [Spectral(), MatchRMSAdamW(), SignalToNoise()])
def test_no_direction_has_no_length(rule: StepLength) -> None:
    layer = Layer()
    assert scale(rule, layer.step(torch.zeros(3, 4, dtype=F64))) == 0.0
    assert 0.0 < scale(rule, layer.step(torch.randn(3, 4, dtype=F64))) < float("inf")


# ------------------------------------------------------------------ signal to noise


def ratio(step: Step, gate: Gate = OPEN) -> float:
    return scale(SignalToNoise(Computed(), power=1.0), step, gate)


@pytest.mark.parametrize("beta", [0.0, 0.8, 0.95])
def test_it_is_that_of_plain_sums_over_all_gradients(beta: float) -> None:
    layer, gradients = Layer(beta), []
    shared = torch.randn(3, 4, dtype=F64)
    for _ in range(20):
        gradients.append(shared + torch.randn(3, 4, dtype=F64))
        want = twins.signal_to_noise(gradients, beta)
        assert ratio(layer.step(gradients[-1])) == pytest.approx(want, rel=1e-12)
    assert beta == 0 or want < 0.95  # gradients did disagree


def test_it_is_one_where_gradients_are_equal() -> None:
    layer, gradient = Layer(), torch.randn(3, 4, dtype=F64)
    for beta in (0.8, 0.8, 0.5, 0.9, 0.0, 0.8):  # whatever became of the momentum's decay
        layer.beta = beta
        assert ratio(layer.step(gradient)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_it_is_that_of_a_mean_of_independent_gradients_where_there_is_no_signal(beta: float) -> None:
    """√((1 - β) / (1 + β)), the size of a moving average of noise, once the start is forgotten."""
    layer = Layer(beta)
    for _ in range(100):
        found = ratio(layer.step(torch.randn(100, 400, dtype=F64)))
    assert found == pytest.approx(((1 - beta) / (1 + beta)) ** 0.5, rel=0.02)


def test_it_shortens_another_rule_by_its_root() -> None:
    layer, gradients, alone = Layer(), [], {}
    for _ in range(5):
        gradients.append(torch.randn(3, 4, dtype=F64))
        step = layer.step(gradients[-1])
        other = scale(Spectral(), replace(step, state=alone))
        assert scale(SignalToNoise(), step) == pytest.approx(other * twins.signal_to_noise(gradients, 0.8) ** 0.5)


@pytest.mark.parametrize("rule", [Spectral(), SignalToNoise(), SignalToNoise(MatchRMSAdamW())])
def test_a_bad_minibatch_changes_no_state(rule: StepLength) -> None:
    layer = Layer()
    for _ in range(3):
        scale(rule, layer.step(torch.randn(3, 4, dtype=F64)))
    before = {key: value.clone() for key, value in layer.state.items()}
    bad = replace(layer.step(torch.zeros(3, 4, dtype=F64)), grad_norms=[torch.tensor(float("nan"), dtype=F64)])
    assert 0.0 < scale(rule, bad, CLOSED) < float("inf")
    assert before.keys() == layer.state.keys()
    assert all(torch.equal(value, before[key]) for key, value in layer.state.items())


def test_layers_together_are_as_alone() -> None:
    """Of different sizes."""
    rule, alone, together = SignalToNoise(), [Layer() for _ in range(3)], [Layer() for _ in range(3)]
    for _ in range(4):
        gradients = [torch.randn(shape, dtype=F64) for shape in ((3, 4), (7, 2), (1, 9))]
        one_by_one = [scale(rule, layer.step(g)) for layer, g in zip(alone, gradients, strict=True)]
        at_once = rule.scales([layer.step(g) for layer, g in zip(together, gradients, strict=True)], OPEN)
        assert at_once is not None
        assert_close(at_once, torch.tensor(one_by_one, dtype=F64), 1e-12)


# ------------------------------------------------------------------ in steps


def net() -> nn.Sequential:
    """Layers that are wider, narrower, and of two channel groups."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 9)
    ).double()


X, Y = torch.randn(12, 2, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 9


@pytest.mark.parametrize("name", UNTUNED)
@pytest.mark.parametrize("rate", [1e-3, torch.tensor(1e-3, dtype=F64)])
def test_steps_have_the_spectral_norm_that_the_rate_says(name: str, rate: Any) -> None:
    """α max(1, √(d_out / d_in)), once the power iteration has found ‖P‖₂: gradients of one minibatch change slowly."""
    member = FAMILY[name]
    model = net()
    recipe = replace(member.recipe, length=Spectral())
    optimizer = replace(member, fixed={**member.fixed, "recipe": recipe}).make(model, lr=rate, damping=0.5, T=50)
    layers: list[Any] = [m for m in model if isinstance(m, ref.LAYERS)]
    for _ in range(40):
        before = [ref.weight_matrix(layer) for layer in layers]
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    for layer, W in zip(layers, before, strict=True):
        norm = float(torch.linalg.matrix_norm(ref.weight_matrix(layer) - W, 2).max())
        assert norm == pytest.approx(1e-3 * max(1.0, (W.shape[-2] / W.shape[-1]) ** 0.5), rel=1e-3)
