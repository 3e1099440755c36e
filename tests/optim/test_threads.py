"""Models that train in threads beside each other train as alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack
from backpack.context import CTX
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.extensions import KBFGSQuantities, extend, input_gradients_only
from kfqn_ext.extensions.active import Active, active
from kfqn_ext.optim import Minibatch
from tests.optim.family import FAMILY, ONE_PER_CLASS
from tests.optim.plain_loop import batch, close, left
from tests.optim.test_resume import assert_identical


class Interleaved:
    """Lets threads run by turns: each waits for the others at every ``meet``, until one of them has ended."""

    def __init__(self, number: int) -> None:
        self.barrier = threading.Barrier(number)
        self.errors: list[BaseException] = []

    def meet(self, *unused: Any) -> None:
        try:
            self.barrier.wait(timeout=60)
        except threading.BrokenBarrierError:
            assert not self.errors  # one has ended, and this one may go on alone

    def run(self, *bodies: Callable[[], Any]) -> None:
        def guarded(body: Callable[[], Any]) -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001  (another thread's: raised below)
                self.errors.append(error)
            finally:
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


class Net(nn.Module):
    """Its forward and backward pass meet those of other threads at every layer."""

    def __init__(self, meet: Callable[..., None], reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(50, 6), nn.Linear(6, 6), nn.Linear(6, 3)])
        self.meet, self.reentrant = meet, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers:
            h = self.again(layer, h) if self.reentrant is not None and h.requires_grad else self.block(layer, h)
        return h

    def again(self, layer: nn.Module, h: Tensor) -> Tensor:
        return checkpoint(self.block, layer, h, use_reentrant=self.reentrant)

    def block(self, layer: nn.Module, h: Tensor) -> Tensor:
        self.meet()
        h = layer(h).tanh()
        if h.requires_grad and not h.is_cuda:  # torch has one thread for the backward passes on a GPU
            h.register_hook(self.meet)
        return h


def net(seed: int, *args: Any) -> Any:
    torch.manual_seed(seed)
    return Net(*args).double()


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    for k in range(3):
        x, y = (value.to(next(model.parameters()).device) for value in batch(seed + k))
        if optimizer.recipe.second_pass.sampled:  # torch's random numbers are the process's: no draws of its own
            optimizer.zero_grad()
            with optimizer.first_pass():
                F.cross_entropy(model(x), y).backward()
            for step in (False, True):
                if optimizer.second_pass_due:
                    with optimizer.second_pass():
                        Minibatch(model, F.cross_entropy, x, y).sampled(k)
                if not step:
                    optimizer.step()
        else:
            optimizer.step(Minibatch(model, F.cross_entropy, x, y))


def make(name: str, model: nn.Module) -> Any:
    return FAMILY[name].make(model, lr=0.05, damping=0.5)


def alone(name: str, seed: int) -> Any:
    model = net(seed, lambda *_: None)
    optimizer = make(name, model)
    train(model, optimizer, seed)
    return left(model, optimizer)


PAIRS = [(name, name) for name in FAMILY] + [("KBFGS", "OnePassKBFGS"), ("KBFGS", "KFAC"), ("OnePassKBFGS", "KFAC")]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.filterwarnings("ignore:Layer .* has a gradient but was not measured")  # KFAC as printed, at first
def test_two_models_in_two_threads_train_as_alone(pair: tuple[str, str]) -> None:
    turns = Interleaved(2)
    models = [net(seed, turns.meet) for seed in (0, 10)]
    optimizers = [make(name, model) for name, model in zip(pair, models, strict=True)]
    turns.run(*(lambda i=i: train(models[i], optimizers[i], 10 * i) for i in range(2)))
    for i, name in enumerate(pair):
        assert_identical(left(models[i], optimizers[i]), alone(name, 10 * i))
    assert CTX.get_active_exts() == () and active() == Active()


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [("KBFGS", "KBFGS"), ("KBFGS", "OnePassKBFGS")], ids=" and ".join)
def test_and_on_a_gpu(pair: tuple[str, str]) -> None:
    turns = Interleaved(2)
    models = [net(seed, turns.meet).cuda() for seed in (0, 10)]
    optimizers = [make(name, model) for name, model in zip(pair, models, strict=True)]
    turns.run(*(lambda i=i: train(models[i], optimizers[i], 10 * i) for i in range(2)))
    for i, name in enumerate(pair):
        twin = net(10 * i, lambda *_: None).cuda()
        optimizer = make(name, twin)
        train(twin, optimizer, 10 * i)
        close(left(models[i], optimizers[i]), left(twin, optimizer))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["KBFGS", "OnePassKBFGS"])
def test_and_with_checkpoints(name: str, reentrant: bool) -> None:
    """Whose layers run again in the backward pass."""
    turns = Interleaved(2)
    models = [net(seed, turns.meet, reentrant) for seed in (0, 10)]
    optimizers = [make(name, model) for model in models]
    turns.run(*(lambda i=i: train(models[i], optimizers[i], 10 * i) for i in range(2)))
    for i in range(2):
        twin = net(10 * i, lambda *_: None, reentrant)
        optimizer = make(name, twin)
        train(twin, optimizer, 10 * i)
        assert_identical(left(models[i], optimizers[i]), left(twin, optimizer))


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_thread_that_fails_leaves_nothing_to_the_other(name: str) -> None:
    turns = Interleaved(2)
    models = [net(seed, turns.meet) for seed in (0, 10)]
    optimizers = [make(name, model) for model in models]

    def failing() -> None:
        with pytest.raises(KeyError), optimizers[0].first_pass():
            F.cross_entropy(models[0](batch(0)[0]), batch(0)[1]).backward()
            raise KeyError
        assert active() == Active()

    turns.run(failing, lambda: train(models[1], optimizers[1], 10))
    assert_identical(left(models[1], optimizers[1]), alone(name, 10))
    train(models[0], optimizers[0], 0)
    assert_identical(left(models[0], optimizers[0]), alone(name, 0))


def test_a_user_s_extension_sees_the_layers_of_all_threads() -> None:
    """It is the process's; an optimizer in another thread neither turns it off nor is disturbed."""
    turns = Interleaved(2)
    model, other = net(0, turns.meet), extend(net(10, turns.meet))
    optimizer, moments, found = make("KBFGS", model), KBFGSQuantities(modules=other.layers), []

    def users() -> None:
        for k in range(6):  # as many passes as the optimizer's
            with backpack(moments):
                F.cross_entropy(other(batch(k)[0]), batch(k)[1]).backward()
            found.append([moments[layer].dh_bar for layer in other.layers])

    turns.run(lambda: train(model, optimizer, 0), users)
    assert_identical(left(model, optimizer), alone("KBFGS", 0))
    twin, want = extend(net(10, lambda *_: None)), KBFGSQuantities()
    for k in range(6):
        with backpack(want):
            F.cross_entropy(twin(batch(k)[0]), batch(k)[1]).backward()
        assert all(torch.equal(a, want[layer].dh_bar) for a, layer in zip(found[k], twin.layers, strict=True))


def test_input_gradients_only_is_a_matter_of_its_thread() -> None:
    turns = Interleaved(2)
    frozen, other = (extend(nn.Linear(4, 3)) for _ in range(2))
    other.requires_grad_(False)
    seen = []

    def inside() -> None:
        with input_gradients_only(frozen):
            turns.meet()
            seen.append(frozen(torch.rand(2, 4)).requires_grad)
            turns.meet()

    def outside() -> None:
        turns.meet()
        seen.append(other(torch.rand(2, 4)).requires_grad)
        turns.meet()

    turns.run(inside, outside)
    assert sorted(seen) == [False, True]


def test_contexts_in_contexts_add_up() -> None:
    a, b = (extend(nn.Linear(4, 3).requires_grad_(False)) for _ in range(2))
    with input_gradients_only(a), input_gradients_only(b):
        assert a(torch.rand(2, 4)).requires_grad and b(torch.rand(2, 4)).requires_grad
    assert not a(torch.rand(2, 4)).requires_grad


def halves(steps: Callable[[Any, Any, Any, Tensor, Tensor], None]) -> Any:
    """Two optimizers of one model, with a part of its layers each."""
    model = net(0, lambda *_: None)
    parts = [model.layers[:1], model.layers[1:]]
    two = [FAMILY["KBFGS"].make(model, lr=0.05, damping=0.5, params=list(part.parameters())) for part in parts]
    for k in range(3):
        steps(model, *two, *batch(k))
    return [left(model, optimizer) for optimizer in two]


def in_turn(model: Any, a: Any, b: Any, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    with a.first_pass(), b.first_pass():
        F.cross_entropy(model(x), y).backward()
    a.step()
    b.step()
    for optimizer in (a, b):
        with optimizer.second_pass():
            F.cross_entropy(model(x), y).backward()


def at_once(model: Any, a: Any, b: Any, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    with a.first_pass(), b.first_pass():
        F.cross_entropy(model(x), y).backward()
    a.step()
    b.step()
    with a.second_pass(), b.second_pass():
        F.cross_entropy(model(x), y).backward()


def test_two_optimizers_measure_one_second_pass() -> None:
    assert_identical(halves(at_once), halves(in_turn))


def test_a_second_pass_within_another_optimizer_s_first_is_none_of_its() -> None:
    def inside(model: Any, a: Any, b: Any, x: Tensor, y: Tensor) -> None:
        with b.first_pass():
            a.step(Minibatch(model, F.cross_entropy, x, y))
        b.step()
        with b.second_pass():
            F.cross_entropy(model(x), y).backward()

    def apart(model: Any, a: Any, b: Any, x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        with a.first_pass(), b.first_pass():
            F.cross_entropy(model(x), y).backward()
        a.step()
        with a.second_pass():
            F.cross_entropy(model(x), y).backward()
        b.step()
        with b.second_pass():
            F.cross_entropy(model(x), y).backward()

    assert_identical(halves(inside), halves(apart))


def test_the_user_s_extensions_see_the_first_pass_and_not_the_second() -> None:
    model = net(0, lambda *_: None)
    optimizer = make("KBFGS", model)
    moments, names = KBFGSQuantities(accumulate=True), []
    with backpack(moments, extension_hook=lambda module: names.append(module)):
        optimizer.step(Minibatch(model, F.cross_entropy, *batch(0)))
    assert all(moments[layer].num_data == 12 for layer in model.layers)
    assert names == [*model.layers][::-1]
