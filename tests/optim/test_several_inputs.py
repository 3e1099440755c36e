"""Minibatches as models have them: several inputs, in order or by name, and outputs of every kind."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.curvature import exact_block
from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.optim import KBFGS, KFAC, Minibatch
from tests.optim.family import FAMILY, classes, rows

N = 8
A, B = (torch.randn(N, d, generator=torch.Generator().manual_seed(d)) for d in (4, 3))
Y = torch.arange(N) % 3
each_class = pytest.mark.parametrize("name", classes())


@dataclass(frozen=True)
class Output:
    logits: Tensor
    step: int = 0


Pair = namedtuple("Pair", ["logits", "rest"])
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda z: {"logits": z, "none": None}, lambda o: o["logits"]),
    "UserDict": (lambda z: UserDict(logits=z), lambda o: o["logits"]),
    "dataclass": (Output, lambda o: o.logits),
    "named": (lambda z: Pair(z, None), lambda o: o.logits),
    "nested": (lambda z: {"all": [Output(z)]}, lambda o: o["all"][0].logits),
}
INPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"b": b, "a": a},
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "OrderedDict": lambda a, b: OrderedDict(b=b, a=a),
    "read only": lambda a, b: MappingProxyType({"a": a, "b": b}),
}
each_input = pytest.mark.parametrize("inputs", INPUTS)


class Net(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any] = lambda z: z) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 3)
        self.wrap = wrap

    def forward(self, a: Tensor, b: Tensor, scale: Tensor | None = None) -> Any:
        z = self.last(torch.tanh(self.first(a) + self.second(b)))
        return self.wrap(z if scale is None else scale * z)


class OneInput(Net):
    """The same of one tensor."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[:, :4].contiguous(), x[:, 4:].contiguous())  # other strides are rounded otherwise


class OfOne(Net):
    """The same of a dictionary, or a list."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch["a"], batch["b"]) if isinstance(batch, dict) else super().forward(*batch)


def best(output: Tensor, *unused: Any) -> Tensor:
    return output.detach().argmin(dim=1)


def run(name: str, make: Callable[[nn.Module], Minibatch], model: nn.Module, **options: Any) -> dict[str, Tensor]:
    optimizer = FAMILY[name].make(model, lr=0.05, **options)
    for k in range(3):
        torch.manual_seed(k)
        optimizer.step(make(model))
    assert FAMILY[name].learned_A in optimizer.state[model.first.weight]
    return dict(model.state_dict())


def expected(name: str, **options: Any) -> dict[str, Tensor]:
    x = torch.cat((A, B), dim=1)
    return run(name, lambda model: Minibatch(model, F.cross_entropy, x, Y, best), OneInput(), **options)


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], value) for key, value in want.items())


@each_class
@each_input
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_inputs_in_order_and_by_name(name: str, inputs: str, fraction: float) -> None:
    """All of them are cut where curvature is learned from a part."""
    options = {"second_pass_fraction": fraction} if FAMILY[name].takes("second_pass_fraction") else {}
    x = INPUTS[inputs](A, B)
    found = run(name, lambda model: Minibatch(model, F.cross_entropy, x, Y, best), Net(), **options)
    assert same(found, expected(name, **options))


@each_class
@pytest.mark.parametrize("x", [{"a": A, "b": B}, [A, B]], ids=["dict", "list"])
def test_a_single_dictionary_or_list(name: str, x: Any) -> None:
    found = run(name, lambda model: Minibatch(model, F.cross_entropy, (x,), Y, best), OfOne())
    assert same(found, expected(name))


@each_class
@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_outputs_and_targets_of_every_kind(name: str, kind: str, fraction: float) -> None:
    """With a sampler of the user's own, whose generator is where the output is."""
    wrap, logits = OUTPUTS[kind]
    options = {"second_pass_fraction": fraction} if FAMILY[name].takes("second_pass_fraction") else {}
    seen = []

    def sampler(output: Any, y: Any, generator: torch.Generator) -> Any:
        seen.append(generator.device.type)
        return {"y": best(logits(output)), "ignored": None}

    def loss(output: Any, y: Any) -> Tensor:
        return F.cross_entropy(logits(output), y["y"])

    def make(model: nn.Module) -> Minibatch:
        return Minibatch(model, loss, (A, B), {"y": Y, "ignored": None}, sampler)

    assert same(run(name, make, Net(wrap), **options), expected(name, **options))
    assert {*seen} == ({"cpu"} if FAMILY[name].samples else set())


def test_what_is_cut() -> None:
    """Tensors alone, wherever they are; numbers that are tensors have no data."""
    scale = torch.tensor(2.0)
    x = UserDict(a=A, b=B, scale=scale)
    part = Minibatch(Net(), F.cross_entropy, x, {"y": [Y], "more": (A, None, True)}).fraction(0.3)
    assert isinstance(part.x, UserDict) and part.x["scale"] is scale
    assert torch.equal(part.x["a"], A[:3]) and torch.equal(part.x["b"], B[:3])
    assert torch.equal(part.y["y"][0], Y[:3]) and torch.equal(part.y["more"][0], A[:3])
    assert part.y["more"][1:] == (None, True) and len(x["a"]) == len(Y) == N  # what was given stays whole
    assert part.output().shape == (3, 3)


@pytest.mark.parametrize(
    ("x", "y", "error", "found"),
    [
        ((A, B[:5]), Y, ValueError, r"one tensor has 8 data .* of shape \[5, 3\], 5"),
        ((A, B), Y[:5], ValueError, r"one tensor has 8 data .* of shape \[5\], 5"),
        ((A, B), [0] * N, TypeError, "can't take a part of int"),
        ((A, "b"), Y, TypeError, "can't take a part of str"),
        ((torch.nested.nested_tensor([A, A], layout=torch.jagged), B), Y, TypeError, "part of a nested NestedTensor"),
    ],
)
def test_what_cannot_be_cut(x: Any, y: Any, error: type[Exception], found: str) -> None:
    model = Net()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, second_pass_fraction=0.5, curvature_update_freq=1)
    with pytest.raises(error, match=f"{found}.*second_pass_fraction=1.0"):
        optimizer.step(Minibatch(model, F.cross_entropy, x, y))
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@each_class
@pytest.mark.parametrize("x", [{"a": A, "c": B}, (A,), [A, B, None, None], {1: A, 2: B}])
def test_inputs_that_the_model_does_not_take(name: str, x: Any) -> None:
    model = Net()
    optimizer = FAMILY[name].make(model, lr=0.1)
    with pytest.raises(TypeError, match=r"Net was called .* forward takes \(a: .*as \(x,\)|keywords must be strings"):
        optimizer.step(Minibatch(model, F.cross_entropy, x, Y, best))
    assert not optimizer.state and not optimizer.second_pass_due


def test_an_error_of_the_model_s_own_stays() -> None:
    def fails(z: Tensor) -> Any:
        raise TypeError("of the model")

    with pytest.raises(TypeError, match="^of the model$"):
        Minibatch(Net(fails), F.cross_entropy, (A, B), Y).loss()


@pytest.mark.parametrize("x", [(A[:0], B[:0]), {"a": A[:0], "b": B[:0]}, A[:0], torch.tensor(1.0)])
def test_no_data(x: Any) -> None:
    with pytest.raises(ValueError, match="no datum"):
        Minibatch(Net(), F.cross_entropy, x, Y)


def test_a_packed_sequence_is_one_input() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: nn.utils.rnn.PackedSequence) -> Tensor:
            return self.head(self.rnn(x)[1][0])

    model = Recurrent()
    x = nn.utils.rnn.pack_sequence([A[:3], A[3:5], A[5:6]])
    optimizer = KBFGS(model)
    assert optimizer.step(Minibatch(model, F.cross_entropy, x, Y[:3])).isfinite()


def test_what_hugging_face_makes_of_text_and_returns() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=20, dim=8, hidden_dim=16, n_heads=2, n_layers=1)
    model = transformers.DistilBertForSequenceClassification(config).eval()
    words = transformers.BatchEncoding({"input_ids": torch.arange(16).reshape(4, 4)})

    def loss(output: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, y)

    def sample(output: Any, y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.multinomial(output.logits.detach().softmax(1), 1, generator=generator)[:, 0]

    optimizer = KFAC(model, second_pass_fraction=0.5)
    losses = [optimizer.step(Minibatch(model, loss, words, torch.arange(4) % 2, sample)) for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]


# ------------------------------------------------------------------ warm starts


def forward_of(name: str) -> Callable[[Minibatch], Any]:
    if FAMILY[name].starts_from_inputs:
        return lambda batch: batch.output()
    return (lambda batch: batch.sampled(0)) if FAMILY[name].samples else lambda batch: batch()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("inputs", ["tuple", "UserDict"])
def test_a_warm_start_from_minibatches(name: str, inputs: str) -> None:
    """As from the same data with a ``forward`` that is written by hand."""
    states = []
    for by_hand in (False, True):
        model = Net()
        optimizer = FAMILY[name].make(model, lr=0.05)
        parts = [slice(0, 5), slice(5, 8)]
        batches = [Minibatch(model, F.cross_entropy, INPUTS[inputs](A[s], B[s]), Y[s], best) for s in parts]
        optimizer.warm_start(batches, forward_of(name) if by_hand else None, progress=False)
        states.append([optimizer.state[p] for p in model.parameters() if p.ndim > 1])
        assert all(p.grad is None for p in model.parameters())
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("name", rows(lambda member: member.starts_from_inputs))
@pytest.mark.parametrize("batch", [{"a": A, "b": B}, UserDict(a=A, b=B), ((A, B), Y), [{"a": A, "b": B}, Y]])
def test_a_warm_start_from_what_a_loader_gives(name: str, batch: Any) -> None:
    model, twin = Net(), OneInput()
    optimizer, other = FAMILY[name].make(model, lr=0.05), FAMILY[name].make(twin, lr=0.05)
    optimizer.warm_start([batch], progress=False)
    other.warm_start([torch.cat((A, B), dim=1)], progress=False)
    for layer in ("first", "second", "last"):
        one, two = (o.state[m.get_submodule(layer).weight] for o, m in ((optimizer, model), (other, twin)))
        assert one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_warm_start_on_nested_tensors(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = KBFGS.as_printed(model, lr=0.05)
    with pytest.raises(UnsupportedLayerError, match=r"Linear\(.*nested tensor.*to_padded_tensor"):
        optimizer.warm_start([torch.nested.nested_tensor([A[:2], A[2:]], layout=layout)], progress=False)
    assert not optimizer.state


# ------------------------------------------------------------------ curvature


@each_input
@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_exact_block(inputs: str, kind: str) -> None:
    """In float64, so that everything is cast wherever it is."""
    wrap, logits = OUTPUTS[kind]
    want = exact_block(OneInput(), F.cross_entropy, torch.cat((A, B), dim=1), Y, "first")
    x = INPUTS[inputs](A, B)
    assert torch.equal(exact_block(Net(wrap), lambda z, y: F.cross_entropy(logits(z), y), x, Y, "first"), want)
    with pytest.raises(TypeError, match=r"Net was called on 1 inputs"):
        exact_block(Net(wrap), lambda z, y: F.cross_entropy(logits(z), y), A, Y, "first")
