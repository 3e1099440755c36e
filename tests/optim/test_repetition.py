"""A second pass must repeat the first: what it leaves, what it is compared with, and what is not learned from."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.extensions import KBFGSQuantities
from kfqn_ext.optim import KBFGS, Minibatch
from kfqn_ext.optim import optimizer as optimizer_module
from tests.optim.family import FAMILY, rows

F64 = torch.float64
REPEATS = rows(lambda member: member.repeats)
each = pytest.mark.parametrize("name", REPEATS)
COMMON: dict[str, Any] = {"lr": 0.1, "damping": 1.0}


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths[:-2], widths[1:-1], strict=True)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1])).to(F64)


def data(k: int, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4, dtype=F64, generator=torch.Generator().manual_seed(k)), torch.arange(size) % 3


def states(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def same(first: Any, second: Any) -> None:
    for a, b in zip(states(first), states(second), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ whose pass it is


def in_halves(name: str, nested: bool) -> list[Any]:
    """Train two halves of a network, with an optimizer each, whose second passes are one or two."""
    model = mlp(4, 6, 5, 3)
    halves = [FAMILY[name].make(model[:1], **COMMON), FAMILY[name].make(model[1:], **COMMON)]

    def backward(k: int) -> None:
        F.cross_entropy(model(data(k)[0]), data(k)[1]).backward()

    for k in range(4):
        model.zero_grad()
        with halves[0].first_pass(), halves[1].first_pass():
            backward(k)
        for half in halves:
            half.step()
        if nested:
            with ExitStack() as stack:
                for half in halves:
                    stack.enter_context(half.second_pass())
                backward(k)
        else:
            for half in halves:
                with half.second_pass():
                    backward(k)
    return halves


@pytest.mark.parametrize("name", rows(lambda member: member.repeats and bool(member.recipe.second)))
def test_second_passes_inside_each_other(name: str) -> None:
    for nested, alone in zip(in_halves(name, True), in_halves(name, False), strict=True):
        same(nested, alone)
        assert sum(int(state["pairs_seen_G"][0]) for state in alone.state.values() if "pairs_seen_G" in state) > 0


@each
def test_an_extension_of_the_users_own_inside_a_second_pass(name: str) -> None:
    runs = []
    for own in (True, False):
        model = mlp(4, 6, 3)
        optimizer = FAMILY[name].make(model, **COMMON)
        for k in range(4):
            x, y = data(k)
            optimizer.zero_grad()
            with optimizer.first_pass():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.second_pass_due:
                mine = KBFGSQuantities(modules=list(model.modules()))
                with optimizer.second_pass(), backpack(*[mine] * own):
                    F.cross_entropy(model(x), y).backward()
                assert len(mine) == 2 * own
        runs.append(optimizer)
    same(*runs)


# ------------------------------------------------------------------ a pass that is none


@each
@pytest.mark.parametrize("body", ["nothing", "forward pass alone", "another model"])
def test_a_second_pass_that_reaches_no_layer(name: str, body: str) -> None:
    model, other = mlp(4, 6, 3), mlp(4, 5, 3)
    optimizer = FAMILY[name].make(model, **COMMON)
    x, y = data(0)
    with optimizer.first_pass():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if not optimizer.second_pass_due:
        return
    message = r"second pass reached none of the layers that are due \(0\.0, 1\)"
    with pytest.raises(RuntimeError, match=message), optimizer.second_pass():
        if body == "forward pass alone":
            model(x)
        elif body == "another model":
            F.cross_entropy(other(x), y).backward()
    optimizer.step(Minibatch(model, F.cross_entropy, x, y))  # it goes on


# ------------------------------------------------------------------ the same data


def drawn_by_next(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    batches: Iterator[int] = iter(range(10_000))
    return lambda: data(next(batches), size)


def drawn_by_a_generator(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    X, generator = torch.randn(500, 4, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.Generator()

    def draw() -> tuple[Tensor, Tensor]:
        index = torch.randint(500, (size,), generator=generator)
        return X[index], index % 3

    return draw


def drawn_by_numpy(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    generator = np.random.default_rng(0)
    return lambda: (torch.from_numpy(generator.standard_normal((size, 4))), torch.arange(size) % 3)


@each
@pytest.mark.parametrize("draw", [drawn_by_next, drawn_by_a_generator, drawn_by_numpy])
def test_a_closure_that_draws_a_minibatch_at_each_call(name: str, draw: Any) -> None:
    """With a rate of zero no pair is due at all: a gradient that changes then changes for the data alone."""
    model, batches = mlp(4, 6, 3), draw(16)
    optimizer = FAMILY[name].make(model, **COMMON | {"lr": 0.0})

    def closure() -> Tensor:
        x, y = batches()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if not FAMILY[name].recipe.second:
        return
    with pytest.warns(UserWarning, match="read other data than the first.*outside of the closure"):
        optimizer.step(closure)
    before = copy.deepcopy([s.get("pairs_seen_G", s["momentum"])[0] for s in optimizer.state.values() if "H_A" in s])
    for _ in range(3):
        optimizer.step(closure)
    after = [s.get("pairs_seen_G", s["momentum"])[0] for s in optimizer.state.values() if "H_A" in s]
    if FAMILY[name].secant_G:
        assert all(int(b) == int(a) == 0 for a, b in zip(after, before, strict=True))


class Heads(nn.Module):
    """A head that reads features behind ``detach``, after layers that made them: its input moves with these."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.probe = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.out(h) + self.probe(h.detach())


@each
def test_inputs_that_move_with_parameters_are_no_other_data(name: str) -> None:
    """Warnings are errors here."""
    torch.manual_seed(0)
    model = Heads().to(F64)
    optimizer = FAMILY[name].make(model, **COMMON)
    for k in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, *data(k)))


@each
def test_noise_in_the_model_is_repeated(name: str) -> None:
    model = nn.Sequential(nn.Dropout(0.5), *mlp(4, 6, 3)).train()
    optimizer = FAMILY[name].make(model, **COMMON)
    for k in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, *data(k)))


# ------------------------------------------------------------------ what a forward pass changes


class Teacher(nn.Module):
    """A student that is compared with a moving average of itself, which its forward pass moves in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.how, self.calls, self.share = mlp(4, 6, 3), how, 0, 0.5
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.add_(0.1)

    def follow(self) -> None:
        self.calls += 1
        for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "in place":
                with torch.no_grad():
                    p.lerp_(q, self.share)
            elif self.how == "in place, behind data":
                p.data.lerp_(q.data, self.share)
            elif self.how == "another memory":
                p.data = torch.lerp(p.data, q.data, self.share)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return self.student(x) + self.teacher(x) + 0.01 * self.calls


@each
@pytest.mark.parametrize("how", ["in place", "in place, behind data", "another memory"])
def test_a_forward_pass_that_moves_a_frozen_copy(name: str, how: str) -> None:
    """The copy moves once a step, from where it was, as without a second pass; and both passes see it move so."""
    model = Teacher(how)
    optimizer, seen = FAMILY[name].make(model, **COMMON), []
    model.teacher.register_forward_hook(lambda module, args, output: seen.append(module[1].bias.clone()))
    expected = [p.clone() for p in model.teacher.parameters()]
    for k in range(5):
        student = [p.detach().clone() for p in model.student.parameters()]
        expected = [torch.lerp(p, q, 0.5) for p, q in zip(expected, student, strict=True)]
        seen.clear()
        optimizer.step(Minibatch(model, F.cross_entropy, *data(k)))
        assert model.calls == k + 1
        for p, want in zip(model.teacher.parameters(), expected, strict=True):
            assert torch.equal(p, want)
        if k > 0 and len(seen) == 2:  # the second pass starts from the copy that the first pass started from
            moved = model.student[1].bias.detach()
            start = 2 * seen[0] - student[-1]
            torch.testing.assert_close(seen[1], torch.lerp(start, moved, 0.5), rtol=1e-12, atol=1e-12)
    if FAMILY[name].secant_G:
        kept = [int(s["pairs_seen_G"][[0, 2]].sum()) for s in optimizer.state.values() if "pairs_seen_G" in s]
        assert all(count == 4 for count in kept), kept  # nothing from the first, which could not be repeated


class Buffers(nn.Module):
    """Buffers that can't be copied to, or that a graph still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 6, 3)
        self.register_buffer("expanded", torch.full((1,), 0.5, dtype=F64).expand(3))
        self.register_buffer("count", torch.zeros((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data.add_(1)
        return self.body(x) * self.expanded


@each
def test_buffers_that_have_not_changed_are_not_written_to(name: str) -> None:
    model = Buffers()
    optimizer = FAMILY[name].make(model, **COMMON)
    version = model.expanded._version
    for k in range(3):
        optimizer.step(Minibatch(model, F.cross_entropy, *data(k)))
        assert float(model.count) == k + 1
    assert model.expanded._version == version and model.expanded.tolist() == [0.5] * 3


# ------------------------------------------------------------------ a part of the minibatch


class TimeMajor(nn.Module):
    """Rows of a sequence, with time before data, or data before time."""

    def __init__(self, time_major: bool, early: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.time_major, self.early = nn.Linear(4, 5), nn.Linear(5, 3), time_major, early

    def rows(self, h: Tensor) -> Tensor:
        return (h.transpose(0, 1) if self.time_major else h).reshape(-1, h.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        N, T = x.shape[:2]
        h = torch.tanh(self.embed(self.rows(x) if self.early else x))
        z = self.head(h if self.early else self.rows(h))
        z = z.reshape(T, N, 3).transpose(0, 1) if self.time_major else z.reshape(N, T, 3)
        return z.mean(1)


@each
@pytest.mark.parametrize("early", [False, True])
def test_a_part_of_rows_in_another_order(name: str, early: bool) -> None:
    """Whatever stands first, the pair is that of the same data, or none: with a rate of zero, none."""
    if not FAMILY[name].takes("second_pass_fraction") or not FAMILY[name].secant_G:
        return
    for time_major in (False, True):
        model = TimeMajor(time_major, early).to(F64)
        optimizer = FAMILY[name].make(model, **COMMON | {"lr": 0.0}, second_pass_fraction=0.5)
        refused = time_major and early
        for k in range(3):
            x = torch.randn(8, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
            batch = Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3)
            if refused and k == 0:
                with pytest.warns(UserWarning, match="read other data than the first"):
                    optimizer.step(batch)
            else:
                optimizer.step(batch)
        for state in optimizer.state.values():
            if "s_G" in state:
                assert state["s_G"].abs().max() < 1e-12, (time_major, early)


# ------------------------------------------------------------------ closures that are good for LBFGS


def gradient_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad.add_(1e-3 * torch.randn(p.shape, dtype=F64, generator=generator))


def logged_norm(model: nn.Module) -> None:
    assert sum(float(p.grad.norm()) for p in model.parameters()) > 0


def clipping(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class Run:
    """Four steps of a network, by a closure that does more than it must, or in phases."""

    def __init__(self, name: str) -> None:
        self.model = mlp(4, 6, 3)
        self.optimizer = FAMILY[name].make(self.model, **COMMON)

    def loss(self, k: int, **how: Any) -> Tensor:
        loss = F.cross_entropy(self.model(data(k)[0]), data(k)[1])
        loss.backward(**how)
        return loss

    def by_closure(self, use: Callable[..., None], **how: Any) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(next_k, **how)
            use(self.model)
            return loss

        for next_k in range(4):  # noqa: B007  # the closure reads it
            self.optimizer.step(closure)
            assert all(p.grad is not None and p.requires_grad for p in self.model.parameters())

    def in_phases(self, use: Callable[..., None]) -> None:
        for k in range(4):
            self.optimizer.zero_grad()
            with self.optimizer.first_pass():
                self.loss(k)
            use(self.model)
            self.optimizer.step()
            if self.optimizer.second_pass_due:
                with self.optimizer.second_pass():
                    self.loss(k)


def nothing(model: nn.Module) -> None:
    pass


@each
@pytest.mark.parametrize("use", [nothing, gradient_noise, logged_norm, clipping])
def test_a_closure_that_uses_gradients(name: str, use: Callable[[nn.Module], None]) -> None:
    """As in phases, in which gradients are used between the first pass and the step."""
    closure, phases = Run(name), Run(name)
    closure.by_closure(use)
    phases.in_phases(use)
    same(closure.optimizer, phases.optimizer)


class Counting(nn.Module):
    """What it computes depends on how often it was called: its buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(float(self.count))
        return x * (1 + self.count)


@pytest.mark.parametrize("name", rows(lambda member: member.repeats or member.samples))
@pytest.mark.parametrize("use", [nothing, logged_norm])
def test_each_repetition_starts_from_the_buffers_of_the_first_pass(name: str, use: Callable[[nn.Module], None]) -> None:
    """Also the repetition that follows one which a gradient was missing in, and one with sampled targets."""
    model = nn.Sequential(nn.Linear(4, 5), Counting(), nn.Tanh(), nn.Linear(5, 3))
    optimizer = FAMILY[name].make(model, lr=0.05, damping=1.0, T=1)
    x, y = torch.randn(8, 4), torch.arange(8) % 3

    class Batch(Minibatch):
        def __call__(self) -> Tensor:
            loss = super().__call__()
            use(model)
            return loss

    for k in range(1, 3):
        optimizer.step(Batch(model, F.cross_entropy, x, y))
        assert set(model[1].seen) == {float(k)}
        model[1].seen.clear()


@each
def test_a_closure_with_backward_inputs(name: str) -> None:
    closure, phases = Run(name), Run(name)
    closure.by_closure(nothing, inputs=list(closure.model.parameters()))
    phases.in_phases(nothing)
    same(closure.optimizer, phases.optimizer)


@each
def test_a_closure_that_asks_for_gradients_by_weights(name: str) -> None:
    """As GradNorm does: these are returned, and no part of the step's gradient."""
    closure, phases = Run(name), Run(name)
    backward = closure.loss

    def loss(k: int, **how: Any) -> Tensor:
        aside = F.cross_entropy(closure.model(data(k)[0]), data(k)[1])
        torch.autograd.grad(aside, closure.model[1].weight)
        return backward(k, **how)

    closure.loss = loss  # type: ignore[method-assign]
    closure.by_closure(nothing)
    phases.in_phases(nothing)
    same(closure.optimizer, phases.optimizer)


@each
def test_a_forward_pass_outside_of_the_closure(name: str) -> None:
    """Said before anything has moved."""
    model = mlp(4, 6, 3)
    optimizer, before = FAMILY[name].make(model, **COMMON), copy.deepcopy(model.state_dict())
    x, y = data(0)
    loss = F.cross_entropy(model(x), y)

    def closure() -> Tensor:
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match="evaluate the model inside the closure"):
        optimizer.step(closure)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    optimizer.step(Minibatch(model, F.cross_entropy, x, y))


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name in rows(lambda member: not member.samples) for call in range(1, FAMILY[name].passes + 1)],
)
def test_ctrl_c_in_a_pass(name: str, call: int) -> None:
    """The next step is one as any other."""
    run, calls = Run(name), []

    def interrupt(model: nn.Module) -> None:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt

    if call == 1 or FAMILY[name].recipe.second:
        with pytest.raises(KeyboardInterrupt):
            run.by_closure(interrupt)
    run.by_closure(nothing)


@each
def test_ctrl_c_between_the_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first pass, before anything has moved: its minibatch is not waiting for a step."""
    run, descend, calls = Run(name), optimizer_module.descend, []

    def interrupted(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        descend(*given)

    monkeypatch.setattr(optimizer_module, "descend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.by_closure(nothing)
    run.by_closure(nothing)
    assert len(calls) == 5


def test_ctrl_c_leaves_what_a_second_pass_had_put_aside() -> None:
    model = Buffers()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data(0)[0]), data(0)[1])
        loss.backward()
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert float(model.count) == 1
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
