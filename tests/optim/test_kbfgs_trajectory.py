"""Ten steps of the optimizers equal a naive dense implementation of algo_8, written from the paper."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.linalg import compact_matrix
from kfqn_ext.optim import KBFGS, KBFGSL, Minibatch, splits
from tests import reference as ref
from tests.cases import assert_close
from tests.optim.family import FAMILY, one_per, rows

F64 = torch.float64
STEPS = 10


def net() -> nn.Module:
    """Stride, groups, a linear layer with locations, dropout, an in-place activation, and BatchNorm's statistics.

    BatchNorm does not follow a layer directly: there y_G is rounding noise, which the reference learns and the
    package refuses on purpose; see the test below.
    """
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
    return [(torch.randn(n, 2, 8, 8, dtype=F64), torch.arange(n) % 3) for n in (8, 12, 7)]


def gram_of_data(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A over all data, from explicit patches, as the model runs."""
    grams, model = {}, copy.deepcopy(model)
    names = {m: name for name, m in model.named_modules() if isinstance(m, ref.LAYERS)}

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        a = ref.patches(module, args[0])
        grams.setdefault(names[module], []).append(torch.einsum("nt...i,nt...j->...ij", a, a))

    for module in names:
        module.register_forward_hook(watch)
    with torch.no_grad():
        for x, _ in data:
            model(x)
    return {name: sum(parts) / sum(len(x) for x, _ in data) for name, parts in grams.items()}


def second_best(output: Tensor, *unused: Any) -> Tensor:
    """Targets without random numbers, for rows that sample them."""
    return output.topk(2, dim=1).indices[:, 1]


def H_G(state: dict[str, Tensor]) -> Tensor:
    return state["H_G"] if "H_G" in state else compact_matrix(state["pairs_G"], state["K_G"], state["gamma_G"])


def compare(optimizer: Any, model: nn.Module, reference: Any, twin: nn.Module, tol: float = 1e-10) -> None:
    """Parameters, buffers and all that was learned."""
    for p, q in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_close(p, q, tol)
    for name, want in reference.state.items():
        state = optimizer.state[model.get_submodule(name).weight]
        assert_close(state["momentum"], want.M, tol)
        assert_close(state["H_A"], want.H_A, tol)
        assert_close(H_G(state), want.H_G, tol)
        for key in ("s_G", "y_G"):
            expected = getattr(want, key)
            assert_close(state[key], expected if isinstance(expected, Tensor) else 0 * state[key], tol)


VARIANTS: dict[str, dict[str, Any]] = {
    "KBFGS": {},
    "KBFGSL-2": {"memory": 2},  # 2p < d_out in one layer, which then has the compact form; the others form H_G
    "KBFGSL-4": {"memory": 4},
    "KBFGSL-100": {"memory": 100},
}


@pytest.mark.parametrize("warm", [False, True], ids=["first minibatch", "warm start"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_equal_the_reference(variant: str, T: int, weight_decay: float, warm: bool) -> None:
    model, data = net(), batches()
    twin, memory = copy.deepcopy(model), VARIANTS[variant].get("memory")
    common = {"lr": 0.1, "damping": 0.7, "weight_decay": weight_decay}
    if memory is None:
        optimizer: Any = KBFGS.as_printed(model, curvature_update_freq=T, **common)
    else:
        optimizer = KBFGSL.as_printed(model, curvature_update_freq=T, history_size=memory, **common)
    torch.manual_seed(1)
    A0 = gram_of_data(model, data) if warm else None
    reference = ref.ReferenceKBFGS(twin, F.cross_entropy, T=T, memory=memory, A0=A0, **common)
    if warm:
        torch.manual_seed(1)
        optimizer.warm_start(data, progress=False)

    losses: list[list[Tensor]] = [[], []]
    start = torch.get_rng_state()
    for k in range(STEPS):
        losses[0].append(optimizer.step(Minibatch(model, F.cross_entropy, *data[k % len(data)])))
    end = torch.get_rng_state()
    torch.set_rng_state(start)
    for k in range(STEPS):
        losses[1].append(reference.step(*data[k % len(data)]))
    assert_close(torch.stack(losses[0]), torch.stack(losses[1]), 1e-10)
    assert torch.equal(torch.get_rng_state(), end)  # the second pass draws nothing of its own
    compare(optimizer, model, reference, twin)

    assert any("K_G" in optimizer.state[p] for p in model.parameters()) is (memory == 2)
    # The test says something only if there was curvature to learn.
    for name, state in reference.state.items():
        assert (state.H_G - state.H_G0).abs().max() > 0.01 * state.H_G0.abs().max(), name
        assert (state.H_A - ref.damped_inverse(state.A, state.lambda_A)).abs().max() > 1e-3 * state.H_A.abs().max(), (
            name
        )


@pytest.mark.parametrize("name", FAMILY)
def test_a_loss_that_is_a_sum_over_data(name: str) -> None:
    """y_G is of one datum's loss: with α/N the sum makes the mean's first step, and learns the mean's pair.

    With α itself, where that sets the length.
    """
    model, (x, y) = net(), batches()[0]
    twin, N = copy.deepcopy(model), 8
    member = FAMILY[name].without_eps()
    rate = 0.1 if member.sets_length else 0.1 / N
    torch.manual_seed(1)
    mean = member.make(model, lr=0.1)
    mean.step(Minibatch(model, F.cross_entropy, x, y, second_best))
    torch.manual_seed(1)
    total = member.make(twin, lr=rate, reduction="sum")
    total.step(Minibatch(twin, lambda a, b: F.cross_entropy(a, b, reduction="sum"), x, y, second_best))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), 1e-12)
        for key in mean.state[p].keys() - {"momentum", "exp_avg_sq", "signal"}:
            assert_close(mean.state[p][key], total.state[q][key], 1e-10)


# λ_G is known beforehand; once for BFGS and once for L-BFGS.
SPATIAL = rows(lambda member: member.secant_G and member.recipe.split is splits.spatial)


@pytest.mark.parametrize("name", one_per(lambda member: type(member.recipe.output_inverse), SPATIAL))
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, bias=False)])
def test_a_layer_before_batch_norm_keeps_its_initial_H_G(name: str, layer: nn.Module) -> None:
    """∂h̄ = 0 there, because BatchNorm removes shifts: y_G would be rounding noise. float32, as in use."""
    model: Any = nn.Sequential(
        copy.deepcopy(layer), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )
    optimizer = FAMILY[name].make(model, lr=0.05, damping=0.5)
    for _ in range(30):
        x = torch.randn(16, 2, 6, 6)
        optimizer.step(Minibatch(model, F.cross_entropy, x, (x.mean((1, 2, 3)) > 0).long()))
    lambda_G = (0.5 / 16) ** 0.5
    state = optimizer.state[model[0].weight]
    matrix = H_G(state).clone()
    assert torch.equal(matrix, torch.eye(matrix.shape[-1]).expand_as(matrix) / torch.tensor(lambda_G))
    assert not state["s_G"].any() and not state["y_G"].any()
    last = H_G(optimizer.state[model[4].weight])
    assert (last - torch.eye(3) / 0.5**0.5).abs().max() > 0.01  # elsewhere it is learned

    model.eval()  # with fixed statistics BatchNorm is an affine map, and ∂h̄ says something
    for _ in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, x, (x.mean((1, 2, 3)) > 0).long()))
    assert state["y_G"].any() and not torch.equal(H_G(optimizer.state[model[0].weight]), matrix)
