"""Ten steps of every row of the recipe table equal a naive dense implementation, written from the paper."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.linalg import double_damping_2020
from kfqn_ext.optim import (
    KBFGS,
    KBFGS20,
    KFAC,
    KroneckerOptimizer,
    Minibatch,
    ProvableKBFGSL,
    running_mean,
    splits,
)
from kfqn_ext.optim.inverses import (
    GammaInverse,
    HessianAction,
    HessianActionLBFGS,
    MovingHessianAction,
    OmegaInverse,
    SecantBFGS,
    SecantLBFGS,
)
from kfqn_ext.optim.recipe import SecondPass
from kfqn_ext.optim.targets import categorical
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY, Member, cell, kfac, rows
from tests.optim.twins import TWINS, RunningMean, RunningMeanOfA, TraceSplit, Twin, twin_of

F64 = torch.float64
STEPS, LR, DAMPING = 10, 0.1, 0.5
both_T = pytest.mark.parametrize("T", [1, 3])


def net() -> nn.Sequential:
    """Stride, groups, a linear layer with locations, dropout, BatchNorm's parameters and statistics, no bias once.

    BatchNorm follows no layer directly: there y_G is rounding noise, which the reference learns and the package not.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3, padding="same", groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(2),
        nn.Linear(16, 5),  # on [N, 6, 16]: six locations
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(30, 3),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of different sizes."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 2, 8, 8, dtype=F64, generator=generator), torch.arange(n) % 3) for n in (8, 12, 7)]


def inverses(optimizer: Any, layer: Any) -> tuple[Tensor, Tensor]:
    """H_A and H_G, formed."""
    state, W = optimizer.state[layer.weight], ref.weight_matrix(layer)
    eye_A, eye_G = (torch.eye(d, dtype=F64).expand(*W.shape[:-2], d, d) for d in (W.shape[-1], W.shape[-2]))
    return optimizer.recipe.input_inverse.precondition(state, eye_A), optimizer.recipe.output_inverse.precondition(
        state, eye_G
    )


def compare(optimizer: Any, model: nn.Module, reference: Any, twin: nn.Module, tol: float = 1e-10) -> None:
    """Parameters, buffers and all that was learned."""
    for p, q in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_close(p, q, tol)
    for name, want in reference.state.items():
        layer: Any = model.get_submodule(name)
        state, (H_A, H_G) = optimizer.state[layer.weight], inverses(optimizer, layer)
        assert_close(state["momentum"], want.M, tol)
        assert_close(H_A, want.H_A, tol)
        assert_close(H_G, want.H_G, tol)
        learned = {"s_G": want.s_G, "y_G": want.y_G, "A": want.A, "Omega": want.A, "Gamma": want.Gamma}
        for key in learned.keys() & state.keys():
            expected = learned[key] if isinstance(learned[key], Tensor) else torch.zeros_like(state[key])
            assert_close(state[key], expected, tol)


def run(
    optimizer: Any, model: nn.Module, reference: Any, twin: nn.Module, make: Callable[..., Any] = Minibatch
) -> None:
    """Ten steps of both from the same random numbers."""
    data = batches()
    losses: list[list[Tensor]] = [[], []]
    torch.manual_seed(2)
    for k in range(STEPS):
        losses[0].append(optimizer.step(make(model, F.cross_entropy, *data[k % len(data)])))
    torch.manual_seed(2)
    for k in range(STEPS):
        losses[1].append(reference.step(*data[k % len(data)]))
    assert_close(torch.stack(losses[0]), torch.stack(losses[1]), 1e-10)
    compare(optimizer, model, reference, twin)


# ------------------------------------------------------------------ pairs of a row and its twin


# With another constant than in the table, or two changed cells.
MORE: dict[str, tuple[Member, Twin]] = {
    "#2 off, running mean": (
        cell(input_inverse=MovingHessianAction(decay=running_mean(0.6))),
        twin_of(RunningMeanOfA, moving_A=True),
    ),
    "trace split, L-BFGS": (
        cell(split=splits.trace, output_inverse=SecantLBFGS(history_size=4)),
        twin_of(TraceSplit, memory=4),
    ),
    "KFAC as printed, running mean": (
        kfac(
            replace(
                KFAC.recipe_stable,
                second_pass=SecondPass.SAMPLED_AFTER_STEP,
                input_inverse=OmegaInverse(running_mean(0.6)),
                output_inverse=GammaInverse(running_mean(0.6)),
            )
        ),
        twin_of(RunningMean, order="printed", largest=0.6),
    ),
}


def rows_and_more(holds: Callable[[Member], bool]) -> list[str]:
    return [*rows(holds), *(name for name, (member, _) in MORE.items() if holds(member))]


def pair(name: str) -> tuple[Member, Twin]:
    return MORE[name] if name in MORE else (FAMILY[name], TWINS[name])


def test_every_row_has_a_twin() -> None:
    assert TWINS.keys() == FAMILY.keys() and not TWINS.keys() & MORE.keys()


# ------------------------------------------------------------------ rows whose second pass repeats the first


@both_T
@pytest.mark.parametrize("row", rows_and_more(lambda member: not member.samples))
def test_ten_steps_equal_the_reference(row: str, T: int) -> None:
    model, twin = net(), net()
    member, dense = pair(row)
    decay = {"weight_decay": 1e-2} if member.takes("weight_decay") else {}
    optimizer = member.make(model, lr=LR, damping=DAMPING, T=T, **decay)
    reference = dense.make(twin, lr=LR, damping=DAMPING, T=T, **decay)
    run(optimizer, model, reference, twin)
    # The test says something only if there was curvature to learn.
    for d in optimizer.diagnostics():
        want = reference.state[d.name]
        least = 1e-4 if member.computed else 0.01  # an average moves less
        moved = (want.H_G - want.H_G0).abs().max() > least * want.H_G0.abs().max()
        assert bool(moved) == (member.secant_G or member.action_G or member.computed), d.name
        assert bool(d.A.kept) == member.action_A, d.name


def by_dimensions(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of most training scripts: biases and norms are spared the weight decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("order", [1, -1], ids=["weights first", "biases first"])
@pytest.mark.parametrize("row", FAMILY)
def test_ten_steps_with_weights_and_biases_in_two_groups(row: str, order: int) -> None:
    """Without dropout, whose random numbers the seeds of the sampled targets shift."""
    model, twin = net(), net()
    for m in (model, twin):
        m[8] = nn.Identity()
    member, dense = FAMILY[row], TWINS[row]
    common = {"lr": 0.05, "damping": DAMPING}
    optimizer = member.make(model, params=by_dimensions(model)[::order], T=2, **common)
    frequencies = {"T1": 2, "sample_targets": second_best} if member.samples else {"T": 2}
    reference = dense.make(twin, weight_decay=0.1, vector_decay=0.0, **frequencies, **common)
    run(optimizer, model, reference, twin, lambda *batch: Minibatch(*batch, sample_targets=second_best))
    assert {p for p, state in optimizer.state.items() if "H_A" in state or "pairs_A" in state} <= {
        p for p in model.parameters() if p.ndim > 1
    }


def gram_factors(model: nn.Module, targets: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ω and Γ over all data, with the data's targets or those of `second_best`."""
    model = copy.deepcopy(model)
    passes = [ref.capture(model, F.cross_entropy, x, y if targets else second_best) for x, y in batches()]
    sizes = [len(x) for x, _ in batches()]

    def mean(name: str, factor: str) -> Tensor:
        parts = [n * getattr(p.layers[name], factor) for n, p in zip(sizes, passes, strict=True)]
        return sum(parts[1:], start=parts[0]) / sum(sizes)

    Omega, Gamma = ({name: mean(name, factor) for name in passes[0].layers} for factor in ("A", "Gamma"))
    return Omega, Gamma


def test_a_warm_start_of_the_trace_split() -> None:
    model = net()
    model[8] = nn.Identity()
    optimizer = KroneckerOptimizer(
        model, recipe=replace(KBFGS.recipe_as_printed, split=splits.trace), lr=LR, damping=DAMPING
    )
    optimizer.warm_start(batches(), lambda batch: F.cross_entropy(model(batch[0]), batch[1]).backward(), progress=False)
    Omega, Gamma = gram_factors(model, targets=True)
    for name in Omega:
        state = optimizer.state[model.get_submodule(name).weight]
        assert_close(state["trace_A"], TraceSplit.power(Omega[name]), 1e-12)
        assert_close(state["trace_G"], TraceSplit.power(Gamma[name]), 1e-12)


def test_ablations_are_what_their_names_say() -> None:
    """K-BFGS-20 is both improvements off, the equal split, and H_G from the identity."""
    off = replace(KBFGS.recipe_as_printed, output_inverse=SecantBFGS(pair_damping=double_damping_2020))
    off = replace(off, input_inverse=MovingHessianAction(), split=splits.equal)
    assert KBFGS20.recipe == replace(off, output_inverse=KBFGS20.recipe.output_inverse)
    assert (KBFGS.recipe_as_printed.input_inverse, KBFGS.recipe_as_printed.output_inverse) == (
        HessianAction(),
        SecantBFGS(),
    )


def test_limited_memory_for_H_A_keeps_no_matrix_of_its_size() -> None:
    """p d_in numbers instead of d_in²."""
    model = nn.Sequential(nn.Linear(200, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = cell(input_inverse=HessianActionLBFGS(history_size=5)).make(model, lr=LR, damping=DAMPING)
    for _ in range(7):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(8, 200), torch.arange(8) % 3))
    state = optimizer.state[model[0].weight]
    assert state["pairs_A"].shape == (10, 201) and max(t.numel() for t in state.values()) == 2010


# ------------------------------------------------------------------ algo_7


@both_T
@pytest.mark.parametrize("memory", [4, 100])
def test_ten_steps_of_the_provable_variant(T: int, memory: int) -> None:
    model, twin = net(), net()
    optimizer = ProvableKBFGSL(
        model, lr=LR, damping_A=0.7, damping_G=0.3, mu1=0.3, decay=0.8, history_size=memory, curvature_update_freq=T
    )
    reference = ref.ReferenceProvable(
        twin, F.cross_entropy, LR, 0.7 * 0.3, T=T, memory=memory, mu1=0.3, beta=0.8, split=lambda damping, T: (0.7, 0.3)
    )
    run(optimizer, model, reference, twin)


# ------------------------------------------------------------------ KFAC


def sample(output: Tensor) -> Tensor:
    """As KFAC samples: a seed from the global random numbers after the first pass, and a generator of its own."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return categorical(output, torch.zeros(len(output), dtype=torch.long), generator)


def second_best(output: Tensor, *unused: Any) -> Tensor:
    """Targets without random numbers."""
    return output.topk(2, dim=1).indices[:, 1]


SAMPLED = rows_and_more(lambda member: member.samples)
FREQUENCIES = [(1, 1), (1, 3), (2, 1), (3, 2)]


def kfac_pair(row: str, T1: int, T2: int, **options: Any) -> tuple[Any, nn.Module, Any, nn.Module]:
    model, twin = net(), net()
    member, dense = pair(row)
    common = {"lr": 0.01, "damping": DAMPING, "weight_decay": 1e-2}
    optimizer = member.make(model, T=T1, inverse_update_freq=T2, **common)
    return optimizer, model, dense.make(twin, T1=T1, T2=T2, **common, **options), twin


@pytest.mark.parametrize(("T1", "T2"), FREQUENCIES)
@pytest.mark.parametrize("row", SAMPLED)
def test_ten_steps_of_kfac(row: str, T1: int, T2: int) -> None:
    """Without dropout, whose random numbers the seeds of the sampled targets shift."""
    optimizer, model, reference, twin = kfac_pair(row, T1, T2, sample_targets=second_best)
    for m in (model, twin):
        m[8] = nn.Identity()

    def batch(*args: Any) -> Minibatch:
        return Minibatch(*args, sample_targets=second_best)

    run(optimizer, model, reference, twin, batch)


@both_T
@pytest.mark.parametrize("row", rows_and_more(lambda member: member.learns_first))
def test_ten_steps_of_kfac_with_sampled_targets_and_dropout(row: str, T: int) -> None:
    """The only random numbers that a step draws beside the model's own are one seed for each sampled pass.

    Rows that learn after the step draw a second one in the first step, where the reference repeats the first.
    """
    run(*kfac_pair(row, 1, T, sample_targets=sample))


@both_T
@pytest.mark.parametrize("row", SAMPLED)
def test_ten_steps_of_kfac_from_a_warm_start(row: str, T: int) -> None:
    optimizer, model, reference, twin = kfac_pair(row, 1, T, sample_targets=sample)
    for m in (model, twin):
        m[8] = nn.Identity()
    reference.Omega0, reference.Gamma0 = gram_factors(model, targets=False)
    buffers, rng = [b.clone() for b in model.buffers()], torch.get_rng_state()
    optimizer.warm_start(
        batches(),
        lambda batch: Minibatch(model, F.cross_entropy, *batch, sample_targets=second_best).sampled(seed=0),
        progress=False,
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    for name, Omega in reference.Omega0.items():
        state = optimizer.state[model.get_submodule(name).weight]
        assert_close(state["Omega"], Omega, 1e-12)
        assert_close(state["Gamma"], reference.Gamma0[name], 1e-12)
    run(optimizer, model, reference, twin)


def test_kfac_as_printed_is_the_printed_recipe() -> None:
    optimizer = KFAC.as_printed(net(), lr=0.3, damping=10.0)
    assert optimizer.recipe == KFAC.recipe_as_printed
    group = optimizer.param_groups[0]
    assert (group["stats_update_freq"], group["inverse_update_freq"], group["momentum"]) == (1, 20, 0.9)


def test_kfac_steps_batch_norm_at_the_learning_rate() -> None:
    model = net()
    optimizer, norm = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.01, damping=DAMPING), model[2]
    before = norm.weight.detach().clone()
    optimizer.step(Minibatch(model, F.cross_entropy, *batches()[0]))
    assert norm.weight.grad is not None
    assert_close(before - norm.weight.detach(), 0.01 * norm.weight.grad, 1e-12)


def test_the_pass_with_sampled_targets_computes_no_weight_gradients() -> None:
    model, seen = net(), []
    optimizer = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.01, damping=DAMPING)

    class Watched(Minibatch):
        def sampled(self, seed: int) -> None:
            assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
            super().sampled(seed)
            seen.append([p.grad for p in model.parameters()])

    batch = Watched(model, F.cross_entropy, *batches()[0])
    optimizer.step(batch)
    assert seen == [[None] * len(list(model.parameters()))]
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())  # what the first pass left


@pytest.mark.parametrize("row", SAMPLED)
def test_kfac_needs_more_than_a_plain_closure(row: str) -> None:
    model = net()
    optimizer = pair(row)[0].make(model, lr=0.01, damping=DAMPING)
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        raise AssertionError("refused before it is called")

    with pytest.raises(TypeError, match="KFAC samples targets .* Minibatch, or use first_pass"):
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    optimizer.step(Minibatch(model, F.cross_entropy, *batches()[0]))


@pytest.mark.parametrize("row", SAMPLED)
def test_kfac_without_a_closure(row: str) -> None:
    """first_pass and second_pass in a person's own loop make the steps that a Minibatch makes."""
    model, twin = net(), net()
    for m in (model, twin):
        m[8] = nn.Identity()
    optimizers = [pair(row)[0].make(m, lr=0.01, damping=DAMPING) for m in (model, twin)]

    def sampled_pass(x: Tensor) -> None:
        if optimizers[1].second_pass_due:
            with optimizers[1].second_pass():
                output = twin(x)
                F.cross_entropy(output, second_best(output)).backward()

    for x, y in batches():
        optimizers[0].step(Minibatch(model, F.cross_entropy, x, y, sample_targets=second_best))
        optimizers[1].zero_grad()
        with optimizers[1].first_pass():
            F.cross_entropy(twin(x), y).backward()
        sampled_pass(x)
        optimizers[1].step()
        sampled_pass(x)
    for p, q in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("damping", [1e-12, 1e-30])
def test_kfac_survives_factors_that_are_singular_in_float32(damping: float) -> None:
    """Equal data make Ω and Γ of rank one: a damping that float32 can't see is raised to what Cholesky needs."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=1e-6, damping=damping)
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.full((8, 6), 100.0), torch.zeros(8, dtype=torch.long)))
    for d in optimizer.diagnostics(eigenvalues=True):
        assert d.A is not None and d.G is not None and d.A.smallest > 0 and d.G.smallest > 0
    assert all(torch.isfinite(value).all() for state in optimizer.state.values() for value in state.values())
