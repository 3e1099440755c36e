"""Steps launch few operations: those that are not due, and what is learned in those that are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfqn_ext.geometry import LayerGeometry, LayerPass
from kfqn_ext.geometry.conv import ConvGeometry
from kfqn_ext.geometry.linear import LinearGeometry
from kfqn_ext.optim import Minibatch, gate
from kfqn_ext.optim.preconditioner import block as blocks
from tests.optim.family import FAMILY, rows
from workloads.operations import Operations


def operations(row: str, blocks: int, **options: Any) -> int:
    """Of one step that is not due, forward and backward pass not counted."""
    torch.manual_seed(0)
    body = [layer for _ in range(blocks) for layer in (nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2))]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 3))
    member = FAMILY[row]
    if "vector_decay" in options:
        decays = {True: options.pop("weight_decay"), False: options.pop("vector_decay")}
        parameters = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in decays]
        options["params"] = [{"params": p, "weight_decay": decays[p[0].ndim > 1]} for p in parameters]
    optimizer = member.make(model, lr=0.05, damping=0.5, T=20, **member.taken(inverse_update_freq=20), **options)
    batch = Minibatch(model, F.cross_entropy, torch.randn(6, 2, 4, 4), torch.arange(6) % 3)
    optimizer.step(batch)
    with optimizer.first_pass():
        batch()
    with Operations() as operations:
        optimizer.step()
    return operations.number


@pytest.mark.parametrize(
    ("row", "options", "per_block", "rest"),
    [
        # Each of the three gradients is cleared, each parameter steps, and there are two products.
        ("KBFGS", {}, 8, 40),
        ("KBFGS", {"weight_decay": 1e-3}, 11, 40),  # and the decay of each
        ("KBFGS", {"weight_decay": 1e-3, "vector_decay": 0.0}, 9, 50),  # that of the weight alone, in two groups
        ("KBFGS", {"direction_dtype": torch.bfloat16}, 10, 40),  # and two casts of the direction
        # And for the layer's length two products, three copies, and two for its own rate; for the two others gradients
        # that are cleared once more.
        *((row, {}, 17, 130) for row in rows(lambda member: member.sets_length)),
    ],
)
def test_operations_of_a_convolution_and_its_normalization(
    row: str, options: dict[str, Any], per_block: int, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, of which the host does not know whether the minibatch is finite."""
    monkeypatch.setattr(gate, "is_on_host", lambda t: False)
    few, many = operations(row, 2, **options), operations(row, 12, **options)
    assert many - few == 10 * per_block
    assert few - 2 * per_block < rest  # which does not grow with the net


@pytest.mark.parametrize(
    ("row", "options", "per_block"),
    [
        ("KBFGS", {}, 2),  # the products
        ("KBFGS", {"weight_decay": 1e-3}, 2),
        ("KBFGS", {"direction_dtype": torch.bfloat16}, 4),
        *((row, {}, 8) for row in rows(lambda member: member.sets_length)),  # and a step of the layer's own length
    ],
)
def test_operations_on_the_host(row: str, options: dict[str, Any], per_block: int) -> None:
    """Where the host knows, gradients are not cleared, and all parameters of one rate step at once."""
    few, many = operations(row, 2, **options), operations(row, 12, **options)
    assert many - few == 10 * per_block


def learning_operations(layers: int, row: str) -> int:
    """Of what layers of two sizes learn in one step, both passes not counted."""
    torch.manual_seed(0)
    body = [m for i in range(layers) for m in (nn.Linear(7 - i % 2, 6 + i % 2), nn.Tanh())]
    model = nn.Sequential(*body, nn.Linear(7, 3))
    optimizer = FAMILY[row].make(model, lr=0.05, damping=0.5)
    batch, learn, operations = (
        Minibatch(model, F.cross_entropy, torch.randn(6, 7), torch.arange(6) % 3),
        optimizer._preconditioner.learn,
        Operations(),
    )
    optimizer.step(batch)

    def counted(*args: Any) -> None:
        with operations:
            learn(*args)

    optimizer._preconditioner.learn = counted  # type: ignore[method-assign]
    optimizer.step(batch)
    assert operations.number > 100
    return operations.number


@pytest.mark.parametrize(
    ("row", "per_layer"),
    [
        # Three products with H, λ_A and λ_G; and copies of vectors to stand beside those of other
        # layers, 14, and of two averages back: the rest is done for all layers at once.
        ("KBFGS", 21),
        ("KBFGS20", 34),  # and the moving average of A
        ("KBFGSL", 46),  # and the compact form of H_G
        ("KBFGSL, many pairs", 23),  # which is formed as a matrix, for all small layers at once
        ("trace split", 47),  # and averages of two traces, and dampings from them
        ("KBFGS, untuned", 47),  # and four more directions for H_A, which are copied as rows
        ("OnePassKBFGS", 32),  # four directions for H_G likewise, without averages of s and y
    ],
)
def test_operations_of_a_layer_that_learns(row: str, per_layer: int) -> None:
    few, many = learning_operations(2, row), learning_operations(12, row)
    assert many - few == 10 * per_layer


def test_operations_of_a_layer_that_learns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "kin", lambda layer: layer)
    few, many = learning_operations(2, "KBFGS"), learning_operations(12, "KBFGS")
    assert many - few == 10 * 263


@pytest.mark.parametrize("name", rows(lambda member: member.pairs_A))
def test_limited_memory_forms_no_A(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its start, which needs the number of locations alone, nor in a warm start."""

    def refuse(*given: Any) -> None:
        raise AssertionError("a matrix was formed")

    for geometry in (LinearGeometry, ConvGeometry):
        monkeypatch.setattr(geometry, "gram", refuse)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    optimizer = FAMILY[name].make(model, lr=0.1, damping=1.0)
    x = torch.randn(8, 2, 5, 5)
    optimizer.warm_start([x], progress=False)
    for _ in range(2):
        optimizer.step(Minibatch(model, F.cross_entropy, x, torch.arange(8) % 3))
    assert optimizer.state[model[3].weight]["pairs_seen_A"][0] > 0


def test_a_layer_s_entries_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its momentum and of its direction, in a step that is not due."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    optimizer = FAMILY["KBFGS"].make(model, lr=0.05, damping=0.5, T=20)
    batch = Minibatch(model, F.cross_entropy, torch.randn(6, 2, 5, 5), torch.arange(6) % 3)
    optimizer.step(batch)
    plain, calls = LayerGeometry.columns, []

    def columns(self: LayerGeometry, *args: Any) -> Any:
        calls.append(self)
        return plain(self, *args)

    monkeypatch.setattr(LayerGeometry, "columns", columns)
    optimizer.step(batch)
    assert len(calls) == 2 * 2


def test_extensions_share_what_they_need_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them measure each layer, and its input and gradient are prepared once."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    optimizer = FAMILY["OnePassKBFGS"].make(model, lr=0.05, damping=0.5, T=1)
    batch = Minibatch(model, F.cross_entropy, torch.randn(6, 2, 5, 5), torch.arange(6) % 3)
    optimizer.step(batch)
    plain, calls = LayerPass.of, []

    def of(geometry: LayerGeometry, *args: Any) -> LayerPass:
        calls.append(geometry)
        return plain(geometry, *args)

    monkeypatch.setattr(LayerPass, "of", of)
    optimizer.step(batch)
    assert len(calls) == 2 and len(optimizer.recipe.first) == 3
