"""A step is the same whether the host knows that the minibatch is finite, as on a CPU, or a device alone does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfqn_ext.optim import gate
from kfqn_ext.optim.gate import Gate
from tests.optim.family import varied
from tests.optim.test_bad_batches import batch, make, net, snapshot

FINITE, NOT = torch.tensor(True), torch.tensor(False)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "is_on_host", lambda t: False)


def trained(name: str, option: str, steps: int = 6, bad: int = 3) -> dict[str, Tensor]:
    """Parameters and state in float64; one minibatch of these is not finite."""
    model = net().double()
    optimizer = make(name, option, model)
    for k in range(steps):
        minibatch = batch(model, k, "y nan" if k == bad else "")
        minibatch.x, minibatch.y = minibatch.x.double(), minibatch.y.double()
        optimizer.step(minibatch)
    return snapshot(model, optimizer)


@pytest.mark.filterwarnings("ignore:A batch had a gradient")
@pytest.mark.filterwarnings("ignore:A second pass")
@pytest.mark.parametrize(("name", "option"), varied("curvature from a part", "bfloat16 directions"))
def test_all_rows_step_alike(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = trained(name, option)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "is_on_host", lambda t: False)
        on_device = trained(name, option)
    assert on_host.keys() == on_device.keys()
    for key, value in on_host.items():
        torch.testing.assert_close(value, on_device[key], rtol=1e-9, atol=1e-12, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.parametrize("finite", [FINITE, NOT], ids=["finite", "not finite"])
def test_what_it_lets_through(finite: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a device: numbers, tensors, gradients, states."""
    grads = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0])]
    before, after, like = torch.zeros(2), torch.ones(2), torch.ones(())
    known = Gate(finite)
    monkeypatch.setattr(gate, "is_on_host", lambda t: False)
    unknown = Gate(finite)
    for value in (0.3, torch.tensor(0.3)):
        assert float(known.choose(value, 2.0, like)) == pytest.approx(float(unknown.choose(value, 2.0, like)))
    assert torch.equal(known.kept(before, after), unknown.kept(before, after))
    assert torch.equal(known.gradients(grads)[1], unknown.gradients(grads)[1])
    assert [float(n) for n in known.numbers(after)] == [float(n) for n in unknown.numbers(after)]
    assert not torch.isnan(unknown.gradients(grads)[0]).any()
    if not bool(finite):
        assert torch.equal(known.gradients(grads)[0], torch.zeros(2))


def test_gradients_of_a_finite_minibatch_are_not_copied_on_the_host() -> None:
    grad = torch.ones(3)
    assert Gate(FINITE).gradients([grad])[0] is grad


@pytest.mark.usefixtures("as_on_a_gpu")
def test_nothing_is_read_from_a_device() -> None:
    class Unreadable(Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("the host waits")

    def made(value: bool) -> Any:
        return torch.tensor(value).as_subclass(Unreadable)

    opened = Gate(made(True))
    opened.kept(torch.zeros(1), torch.ones(1))
    opened.choose(1.0, 0.0, torch.ones(()))
    opened.gradients([torch.ones(1)])
