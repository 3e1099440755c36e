"""Random numbers of a model that another thread disturbs: noticed, and nothing is learned from such passes."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfqn_ext.optim import KBFGS, KFAC, Minibatch
from kfqn_ext.optim.passes.draws import Draws, draws
from tests.optim.plain_loop import left
from tests.optim.test_resume import assert_identical
from tests.optim.test_threads import Interleaved

X, Y = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
OTHER = "drew other random numbers than the first.*lock"


def nothing(*unused: Any) -> None:
    pass


class Net(nn.Module):
    """Between its layers it meets other threads, and drops some of its units."""

    def __init__(self, meet: Callable[..., None] = nothing, p: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.drop = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]), nn.Dropout(p)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.drop(layer(x).tanh())
            self.meet()
        return self.layers[-1](x)


def train(model: nn.Module, optimizer: Any, steps: int = 3, lock: Any = nullcontext) -> None:
    for _ in range(steps):
        with lock():
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


def learned(optimizer: Any) -> int:
    return sum(layer.G.kept for layer in optimizer.diagnostics())


def alone() -> tuple[Any, Any]:
    model = Net()
    optimizer = KBFGS(model)
    train(model, optimizer)
    return model, optimizer


@contextmanager
def drawing(turns: Callable[[], bool]) -> Iterator[Callable[..., None]]:
    """Another thread, that draws whenever it is met and ``turns`` says so."""
    begin, done, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def run() -> None:
        while begin.acquire() and not ended.is_set():
            if turns():
                torch.rand(5)
            done.release()

    def meet(*unused: Any) -> None:
        begin.release()
        done.acquire()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield meet
    finally:
        ended.set()
        begin.release()
        thread.join()


def every(n: int) -> Callable[[], bool]:
    count = iter(range(10**6))
    return lambda: next(count) % n == 0


def test_a_thread_that_draws_between_a_model_s_masks() -> None:
    """In one of the passes alone: the other pass then has other masks."""
    with drawing(every(4)) as meet:
        model = Net(meet)
        optimizer = KBFGS(model)
        with pytest.warns(UserWarning, match=OTHER):
            train(model, optimizer)
    assert learned(optimizer) == 0 and all("H_A" in state for state in map(optimizer.state.get, weights(model)))
    assert learned(alone()[1]) > 0


def weights(model: Any) -> list[Tensor]:
    return [layer.weight for layer in model.layers]


def test_it_is_one_pair_that_is_left_out() -> None:
    disturbed = [True]
    with drawing(lambda: bool(disturbed and disturbed.pop())) as meet:
        model = Net(meet)
        optimizer = KBFGS(model)
        with pytest.warns(UserWarning, match=OTHER):
            train(model, optimizer, 1)
        assert learned(optimizer) == 0
        train(model, optimizer, 2)
    assert learned(optimizer) > 0


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_model_that_draws_nothing_learns_beside_one_that_always_draws(p: float) -> None:
    """With masks of a rate of zero, and in evaluation mode."""
    models = []
    for around in (nullcontext(nothing), drawing(every(3))):
        with around as meet, warnings.catch_warnings():
            warnings.simplefilter("error")
            model = Net(meet, p)
            model.drop.eval()
            optimizer = KBFGS(model)
            train(model, optimizer)
            models.append(left(model, optimizer))
    assert_identical(*models)


def test_two_models_in_two_threads() -> None:
    """They meet at each layer, so that masks differ in about half of the pairs: none of these is learned from."""
    turns, found = Interleaved(2), []

    def run(model: Any, masks: list[Tensor]) -> None:
        model.drop.register_forward_hook(lambda module, args, output: masks.append(output.detach() == 0))
        optimizer, before = KBFGS(model, curvature_update_freq=1), 0
        for _ in range(20):
            masks.clear()
            train(model, optimizer, 1)
            now = sum(layer.G.kept + layer.G.skipped for layer in optimizer.diagnostics())
            found.append((all(map(torch.equal, masks[:2], masks[2:])), now > before))
            before = now

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        turns.run(*(lambda: run(Net(turns.meet), []) for _ in range(2)))
    assert {(True, True), (False, False)} <= set(found) and (False, True) not in found
    assert any("drew other random numbers" in str(warning.message) for warning in told)


class MeetingDropout(nn.Dropout):
    """Where it draws, it meets others of its kind."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(20)
        dropped = super().forward(x)
        self.barrier.wait(20)
        return dropped


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_at_the_same_time_agree_with_none(threads: int) -> None:
    """The generator is left in one place, whoever drew first."""
    barrier, found = threading.Barrier(threads), [Draws() for _ in range(threads)]

    def run(seen: Draws) -> None:
        model = MeetingDropout(barrier)
        with seen.watch(model):
            model(torch.ones(4))

    running = [threading.Thread(target=run, args=(seen,)) for seen in found]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert [seen.agree_with(seen) for seen in found] == threads * [threads == 1]


def test_the_order_of_calls_counts() -> None:
    """One module's calls may have each other's masks, where another thread has set the generator between them."""
    torch.manual_seed(3)
    model, found, states = nn.Dropout(), [Draws() for _ in range(2)], []
    with found[0].watch(model):
        for _ in range(2):
            states.append(torch.get_rng_state())
            model(X)
    with found[1].watch(model):
        for state in reversed(states):
            torch.set_rng_state(state)
            model(X)
    assert not found[0].agree_with(found[1])


def test_a_call_that_raises_is_over() -> None:
    class BrokenDropout(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    broken, seen = BrokenDropout(), Draws()
    with pytest.raises(ValueError), Draws().watch(broken):
        broken(X)
    with seen.watch(whole := nn.Dropout()):
        whole(X)
    assert seen.agree_with(seen)


def test_and_with_a_lock() -> None:
    """Each draws other numbers than alone, the same in both passes, and all pairs are learned from."""
    lock, models = threading.Lock(), [Net(), Net()]
    optimizers = [KBFGS(model) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Interleaved(2).run(*(lambda i=i: train(models[i], optimizers[i], 3, lambda: lock) for i in range(2)))
    assert [learned(optimizer) for optimizer in optimizers] == 2 * [learned(alone()[1])]


# ------------------------------------------------------------------ what is no reason


def phases(aside: Callable[[nn.Module], Any], place: str, passes: str) -> Any:
    """Pass by pass, with something beside the pass that counts."""
    model = Net()
    optimizer = KBFGS(model)
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for name, context in (("first", optimizer.first_pass), ("second", optimizer.second_pass)):
            with context():
                if place == "before" and name == passes:
                    aside(model)
                F.cross_entropy(model(X), Y).backward()
                if place == "after" and name == passes:
                    aside(model)
            if name == "first":
                optimizer.step()
    return optimizer


def dropping(model: nn.Module) -> Any:
    return model(X)


def evaluating(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(X)


def augmenting(model: nn.Module) -> Any:
    return torch.rand(3)


@pytest.mark.parametrize("passes", ["first", "second"])
@pytest.mark.parametrize("aside", [dropping, evaluating, augmenting])
def test_draws_after_the_pass_that_counts(aside: Any, passes: str) -> None:
    optimizer = phases(aside, "after", passes)
    assert learned(optimizer) == learned(phases(nothing, "after", passes)) > 0


@pytest.mark.parametrize("aside", [evaluating, augmenting])
def test_draws_before_it_in_one_pass_alone_give_other_masks(aside: Any) -> None:
    with pytest.warns(UserWarning, match=OTHER):
        optimizer = phases(aside, "before", "first")
    assert learned(optimizer) == 0


def test_in_both_passes_they_give_the_same() -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X + 0.1 * torch.randn(12, 6)), Y)
        loss.backward()
        return loss

    model = Net()
    optimizer = KBFGS(model)
    for _ in range(3):
        optimizer.step(closure)
    assert learned(optimizer) > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_what_it_drew(reentrant: bool) -> None:
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=reentrant)

    model = Again()
    optimizer = KBFGS(model)
    train(model, optimizer)
    assert learned(optimizer) > 0


def test_targets_that_the_model_samples_need_no_masks_of_the_first_pass() -> None:
    with drawing(every(4)) as meet:
        model = Net(meet)
        train(model, KFAC(model))


def test_which_modules_draw() -> None:
    class DropPath(nn.Module):
        pass

    class Quiet(nn.Module):
        dropout = nn.Dropout()

    yes = [nn.Dropout(), nn.AlphaDropout(), nn.RReLU(), nn.MultiheadAttention(4, 2, dropout=0.1), DropPath()]
    yes.append(nn.LSTM(4, 4, 2, dropout=0.1))
    no = [nn.Dropout(0.0), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4), nn.Linear(4, 4), nn.ReLU(), Quiet()]
    assert all(map(draws, yes)) and not any(map(draws, no))
    assert not any(draws(module.eval()) for module in yes)
