"""Quantities that are not there: one clear error, which says what to do."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext.errors import MissingQuantitiesError, UnsupportedLayerError
from kfqn_ext.extensions import InputGram, KBFGSQuantities, extend


@pytest.mark.parametrize("ext", [KBFGSQuantities(), InputGram()], ids=lambda e: type(e).__name__)
def test_read_before_backward(ext: Any) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 2)))
    assert model[0] not in ext
    for _ in range(2):
        with pytest.raises(MissingQuantitiesError) as error:
            ext[model[0]]
        for word in (
            type(ext).__name__,
            "Linear(in_features=3, out_features=2",
            "kfqn_ext.extend",
            "backward",
            "backpack(ext)",
        ):
            assert word in str(error.value)
        with backpack(ext):
            model(torch.rand(4, 3))  # a forward pass alone gives nothing either
    assert not hasattr(model[0].weight, ext.savefield)


def test_of_a_model_that_was_never_extended() -> None:
    layer, ext = nn.Linear(3, 2), KBFGSQuantities()
    with backpack(ext):
        layer(torch.rand(4, 3)).sum().backward()
    with pytest.raises(MissingQuantitiesError, match="extended model"):
        ext[layer]


def test_backward_outside_the_context() -> None:
    layer, ext = extend(nn.Linear(3, 2)), KBFGSQuantities()
    with backpack(ext):
        loss = layer(torch.rand(4, 3)).sum()
    loss.backward()
    with pytest.raises(MissingQuantitiesError, match="inside `with backpack"):
        ext[layer]


def test_of_a_layer_that_the_loss_does_not_reach() -> None:
    a, b, ext = extend(nn.Linear(3, 2)), extend(nn.Linear(3, 2)), KBFGSQuantities()
    with backpack(ext):
        x = torch.rand(4, 3)
        (a(x).sum() + 0 * b(x).detach().sum()).backward()
    assert a in ext and b not in ext
    with pytest.raises(MissingQuantitiesError):
        ext[b]


def test_the_operator_after_a_probe() -> None:
    layer, ext = extend(nn.Linear(3, 2)), KBFGSQuantities(probe=lambda module, a_bar: a_bar)
    with backpack(ext):
        layer(torch.rand(4, 3)).sum().backward()
    with pytest.raises(MissingQuantitiesError, match="without a probe"):
        _ = ext[layer].A
    none = KBFGSQuantities(probe=lambda module, a_bar: None)
    with backpack(none):
        layer(torch.rand(4, 3)).sum().backward()
    assert none[layer].s is None and none[layer].A_s is None and none[layer].operator is None


def test_an_empty_batch_gives_no_quantities() -> None:
    for layer, shape in ((nn.Linear(3, 2), (0, 3)), (nn.Conv2d(3, 2, 2), (0, 3, 4, 4)), (nn.Linear(3, 2), (0, 5, 3))):
        extend(layer)
        moments, gram = KBFGSQuantities(), InputGram()
        with backpack(moments, gram):
            layer(torch.rand(shape)).sum().backward()
        assert layer not in moments and layer not in gram


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "parametrized"),
        (lambda: Scaled(3, 2), "overrides Linear.forward"),
        (lambda: nn.ConvTranspose1d(1, 1, 2), "not a registered kind"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "complex"),
    ],
)
def test_the_reason_comes_first(build: Any, reason: str) -> None:
    layer, ext = extend(build()), KBFGSQuantities()
    with backpack(ext):
        layer(torch.rand(4, 1, 3) + (0j if reason == "complex" else 0)).abs().sum().backward()
    with pytest.raises(MissingQuantitiesError, match=reason) as error:
        ext[layer]
    assert "kfqn_ext.extend" not in str(error.value)


def test_a_layer_that_was_not_asked_for() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    ext = KBFGSQuantities(modules=[model[1]])
    with backpack(ext):
        model(torch.rand(4, 3)).sum().backward()
    assert model[1] in ext
    with pytest.raises(MissingQuantitiesError, match="not among `modules`"):
        ext[model[0]]


def test_an_empty_batch_is_named_as_the_reason() -> None:
    layer, ext = extend(nn.Linear(3, 2)), KBFGSQuantities()
    with backpack(ext):
        layer(torch.rand(0, 3)).sum().backward()
    with pytest.raises(MissingQuantitiesError, match="empty"):
        ext[layer]


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_input(layout: torch.layout) -> None:
    """Of an extended model that is not measured it is nobody's business; else it is called by its name."""
    model, ext = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), KBFGSQuantities()
    torch.manual_seed(0)
    x, grads = nested(layout), []
    for prepare in (lambda m: m, extend):
        model.zero_grad()
        torch.nested.to_padded_tensor(prepare(model)(x), 0.0).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(UnsupportedLayerError, match=r"Linear\(.*nested tensor.*to_padded_tensor"), backpack(ext):
        torch.nested.to_padded_tensor(model(x), 0.0).sum().backward()
    with backpack(ext):
        model(torch.nested.to_padded_tensor(x, 0.0)).sum().backward()
    assert ext[model[0]].num_data == 2
    with backpack(KBFGSQuantities(modules=[model[2]])), torch.no_grad():
        model(x)


def test_a_sparse_input() -> None:
    layer = extend(nn.Linear(3, 2))
    with pytest.raises(UnsupportedLayerError, match=r"Linear\(.*sparse.*to_dense"), backpack(KBFGSQuantities()):
        layer(torch.eye(3).to_sparse()).sum().backward()
