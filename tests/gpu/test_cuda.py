"""The core promises again on a CUDA device: same numbers as on the CPU, and a host that never waits."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, KFAC, InputGram, KBFGSQuantities, Minibatch, extend
from kfqn_ext.linalg import bfgs_update_
from tests.optim.family import FAMILY, OPTIONS, rows, varied

pytestmark = pytest.mark.gpu

each = pytest.mark.parametrize("name", FAMILY)


def make(name: str, model: nn.Module, **options: Any) -> Any:
    return FAMILY[name].make(model, **{"lr": 0.1, "T": 2} | options)


def second_best(output: Tensor, *unused: Any) -> Tensor:
    """Targets that are the same on every device, in place of sampled ones."""
    return output.topk(2, dim=1).indices[:, 1]


def batch(model: nn.Module, x: Tensor, y: Tensor) -> Minibatch:
    return Minibatch(model, cross_entropy, x, y, sample_targets=second_best)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(8)),
        *(nn.Conv2d(8, 8, 3, groups=2, stride=2), nn.ReLU(inplace=True), nn.Flatten()),
        nn.Linear(8 * 9, 10),
    ).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(16, 3, 8, 8, dtype=dtype), torch.randint(10, (16,))) for _ in range(count)]


def test_quantities_equal_those_of_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = extend(network()).to(device)
        x, y = batches(1)[0]
        with backpack(KBFGSQuantities(), InputGram()):
            cross_entropy(model(x.to(device)), y.to(device)).backward()
        results.append([(m.weight.kbfgs, m.weight.input_gram) for m in (model[0], model[3], model[6])])
    for (cpu, cpu_gram), (gpu, gpu_gram) in zip(*results, strict=True):
        for name in ("a_bar", "h_bar", "dh_bar"):
            torch.testing.assert_close(getattr(gpu, name).cpu(), getattr(cpu, name))
        torch.testing.assert_close((gpu.A @ gpu.a_bar).cpu(), cpu.A @ cpu.a_bar)
        torch.testing.assert_close(gpu_gram.A.cpu(), cpu_gram.A)


@each
def test_ten_steps_equal_those_on_the_cpu(name: str) -> None:
    parameters = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        optimizer = make(name, model)
        for x, y in batches(10):
            optimizer.step(batch(model, x.to(device), y.to(device)))
        parameters.append([p.detach().cpu() for p in model.parameters()])
    for cpu, gpu in zip(*parameters, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-8, atol=1e-10)


def test_an_update_leaves_H_symmetric_to_the_last_bit() -> None:
    for d in (1, 5, 17, 33, 64, 100, 257):
        s, root = torch.randn(3, d, device="cuda"), torch.randn(3, d, d, device="cuda")
        H = torch.eye(d, device="cuda").repeat(3, 1, 1)
        assert bfgs_update_(H, s, s + 0.1 * (root @ (root.mT @ s.unsqueeze(-1))).squeeze(-1)).all()
        assert torch.equal(H, H.mT)


def test_kfac_lowers_the_loss() -> None:
    model = network().cuda()
    optimizer = KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.05, damping=1.0)
    x, y = (t.cuda() for t in batches(1)[0])
    losses = [optimizer.step(Minibatch(model, cross_entropy, x, y)).item() for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("name", "option"), varied())
def test_a_step_never_waits_for_the_device(name: str, option: str) -> None:
    model = network(torch.float32).cuda()
    options = {key: v.cuda() if isinstance(v, Tensor) else v for key, v in OPTIONS[option].items()}
    optimizer = make(name, model, **options)
    data = [(x.cuda(), y.cuda()) for x, y in batches(5, torch.float32)]
    optimizer.step(Minibatch(model, cross_entropy, *data[0]))  # makes the initial curvature, which may wait
    with no_waiting():
        for x, y in data[1:]:
            optimizer.step(Minibatch(model, cross_entropy, x, y))


@each
def test_state_moves_between_devices(name: str) -> None:
    """A run that is moved to the GPU half-way goes on as on the CPU."""
    data = batches(6)
    model = network()
    optimizer = make(name, model)
    for x, y in data[:3]:
        optimizer.step(batch(model, x, y))
    moved = copy.deepcopy(model).cuda()
    other = make(name, moved)
    other.load_state_dict(optimizer.state_dict())
    for x, y in data[3:]:
        optimizer.step(batch(model, x, y))
        other.step(batch(moved, x.cuda(), y.cuda()))
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-8, atol=1e-10)


def test_a_batch_that_is_not_finite_changes_nothing() -> None:
    model = network(torch.float32).cuda()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    x, y = (t.cuda() for t in batches(1, torch.float32)[0])
    optimizer.step(Minibatch(model, cross_entropy, x, y))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step(Minibatch(model, cross_entropy, x * torch.nan, y))
        torch.cuda.synchronize()
        for p, q in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, q)
        optimizer.step(Minibatch(model, cross_entropy, x, y))  # the warning comes once the flag has arrived


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", rows(lambda member: member.takes("direction_dtype")))
@pytest.mark.parametrize("on_device", [False, True], ids=["lr", "lr on the device"])
def test_a_step_without_update_can_be_captured(name: str, dtype: torch.dtype | None, on_device: bool) -> None:
    """As a CUDA graph that is replayed on new gradients, it moves the parameters as the same steps do one by one."""
    results = []
    for capture in (False, True):
        model = network(torch.float32).cuda()
        lr = torch.tensor(0.1, device="cuda") if on_device else 0.1
        seldom = {"inverse_update_freq": 1000} if FAMILY[name].takes("inverse_update_freq") else {}
        optimizer = make(name, model, lr=lr, T=1000, direction_dtype=dtype, **seldom)
        data = [(x.cuda(), y.cuda()) for x, y in batches(5, torch.float32)]
        optimizer.step(Minibatch(model, cross_entropy, *data[0]))  # makes the initial curvature
        optimizer.step()  # and the copies of the inverses
        graph = torch.cuda.CUDAGraph()
        if capture:
            saved = [p.detach().clone() for p in model.parameters()]
            state = {k: {n: v.clone() for n, v in s.items()} for k, s in optimizer.state.items()}
            with torch.cuda.graph(graph):
                optimizer.step()
            for p, value in zip(model.parameters(), saved, strict=True):  # capturing has computed nothing
                assert torch.equal(p, value)
            assert all(torch.equal(s[n], state[k][n]) for k, s in optimizer.state.items() for n in s)
        for x, y in data[1:]:
            loss = cross_entropy(model(x), y)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                assert p.grad is not None
                p.grad.copy_(g)
            graph.replay() if capture else optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(q, p)
