"""Small calls of a layer that wait for each other are measured as one batch, and give what they give one by one."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext import OnePassKBFGS, OnePassKFAC
from kfqn_ext.extensions import KBFGSQuantities, LayerExtension, base, extend
from tests.cases import assert_close
from tests.extensions.test_every_extension import EXTENSIONS
from workloads.operations import Operations

F64 = torch.float64
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "several places": (lambda: nn.Linear(3, 4), (2, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, padding=1), (2, 5, 5)),
    "groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 5, 5)),
}
EQUAL, OTHER = (5, 5, 5, 5), (5, 5, 3, 5)  # data in each call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of data of each batch that an extension has measured."""
    seen: list[int] = []
    for kind in [kind for kind in EXTENSIONS if "measure" in vars(kind)]:
        original = kind.measure

        def noting(self: Any, module: nn.Module, layer: Any, original: Any = original) -> Any:
            seen.append(layer.num_data)
            return original(self, module, layer)

        monkeypatch.setattr(kind, "measure", noting)
    return seen


def run(ext: LayerExtension[Any], name: str, sizes: tuple[int, ...], hook: Any = None) -> dict[str, Any]:
    """What an extension finds of a layer that is called once for each of these sizes."""
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = extend(build().double())
    with backpack(ext):
        outputs = [layer(torch.randn(size, *shape, dtype=F64)) for size in sizes]
        for output in outputs if hook is not None else ():
            output.grad_fn.register_prehook(hook)
        loss = sum(output.square().sum() for output in outputs)
        (loss / sum(sizes) if ext.reduction == "mean" else loss).backward()
    ext.finish()
    found = dict(vars(ext[layer]))
    if found.get("operator") is not None:
        found["operator"] @= torch.ones(found["operator"].shape[:-1], dtype=F64)
    return found


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert_close(got[name], value, 1e-12)
        else:
            assert got[name] == value


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", EXTENSIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("part", [None, 0.5])
@pytest.mark.parametrize("sizes", [EQUAL, OTHER])
def test_one_batch_is_as_all_calls(
    name: str, kind: Any, reduction: str, part: float | None, sizes: tuple[int, ...], measured: list[int]
) -> None:
    waits = kind(reduction, part)
    waits.waits = lambda module: True
    got = run(waits, name, sizes)
    own = [3 if part else 5] * 4
    assert (measured == [sum(own)]) is (sizes == EQUAL)
    assert_same(got, run(kind(reduction, part), name, sizes))


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_many_numbers_are_measured_before_the_pass_has_ended(
    kind: Any, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_FEW_NUMBERS", 92)  # two calls, and the weight
    more: list[int] = []
    original = kind.measure_more
    monkeypatch.setattr(kind, "measure_more", lambda *args: more.append(args[-1].num_data) or original(*args))
    waits = kind()
    waits.waits = lambda module: True
    got = run(waits, "linear", (5,) * 7)
    assert measured[0] == 10 and more == [5, 10, 5, 5]
    assert_same(got, run(kind(), "linear", (5,) * 7))


@pytest.mark.parametrize("few", [92, 2**19])
def test_a_gradient_that_is_changed_in_place_meanwhile_is_not_measured(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its call waits for the end of the pass, or for the third one."""
    monkeypatch.setattr(base, "_FEW_NUMBERS", few)

    def spoil(gradients: tuple[Tensor, ...]) -> None:
        gradients[0].zero_()

    waits = KBFGSQuantities()
    waits.waits = lambda module: True
    with pytest.raises(RuntimeError, match="a hook has changed the gradient .* in place.* return a new tensor"):
        run(waits, "linear", EQUAL, hook=spoil)
    assert waits.items() == [] and not waits._results


def test_calls_that_wait_hold_one_copy_of_the_weight() -> None:
    ext, layer = KBFGSQuantities(), extend(nn.Linear(64, 64, dtype=torch.bfloat16))
    ext.waits = lambda module: True
    with backpack(ext):
        sum(layer(torch.randn(2, 64, dtype=torch.bfloat16)).sum() for _ in range(4)).backward()
    waiting = ext._results[layer].waiting
    assert len(waiting) == 4 and waiting[0].layer.weight.dtype == torch.float32
    assert len({call.layer.weight.data_ptr() for call in waiting}) == 1
    assert ext[layer].num_data == 8 and not ext._results[layer].waiting


def test_two_losses_through_calls_that_wait() -> None:
    found = []
    for waits in (True, False):
        torch.manual_seed(0)
        ext, layer = KBFGSQuantities(accumulate=True), extend(nn.Linear(3, 4).double())
        ext.waits = lambda module, waits=waits: waits
        with backpack(ext):
            outputs = [layer(torch.randn(5, 3, dtype=F64)) for _ in range(2)]
            for power in (2, 3):
                (sum((output**power).sum() for output in outputs) / 10).backward(retain_graph=True)
        found.append({name: value for name, value in vars(ext[layer]).items() if name != "operator"})
    assert_same(*found)


class Recurrent(nn.Module):
    """A cell that is called six times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for row in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat((row, state), 1)))
        return self.head(state)


def trained(make: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = Recurrent().double()
    optimizer = make(model)
    for _ in range(5):
        x, y = torch.randn(5, 6, 3, dtype=F64), torch.arange(5) % 3
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("make", [OnePassKBFGS, OnePassKFAC])
def test_steps_of_a_recurrent_network(make: Any, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first pass on, which another optimizer may resume."""
    got = trained(make)
    assert measured.count(30) >= 5 and set(measured) == {5, 30}
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)
    measured.clear()
    for one, other in zip(got, trained(make), strict=True):
        assert_close(one, other, 1e-9)
    assert set(measured) == {5}


def operations_of_a_call(make: Any) -> float:
    """What one more call of the cell adds to a step that is due, forward and backward pass included."""
    numbers = []
    for calls in (6, 12):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer, operations = make(model), Operations()
        x, y = torch.randn(5, calls, 3), torch.arange(5) % 3
        for k in range(2):
            with operations if k else nullcontext():
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad()
        numbers.append(operations.number)
    return (numbers[1] - numbers[0]) / 6


def test_a_call_that_waits_takes_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    together = operations_of_a_call(OnePassKBFGS)
    monkeypatch.setattr(base, "_FEW_NUMBERS", 0)
    assert (together, operations_of_a_call(OnePassKBFGS)) == (9, 39)
