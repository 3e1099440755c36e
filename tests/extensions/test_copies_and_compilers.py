"""What torch makes of an extended model: copies, programs, quantized models. Each is right, or says ``unextend``."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backpack import backpack
from torch import Tensor, nn

from kfqn_ext import KBFGSQuantities, extend, unextend

X = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


def used(model: nn.Module) -> nn.Module:
    """Extended, and measured once."""
    with backpack(KBFGSQuantities()):
        extend(model)(X).square().sum().backward()
    model.zero_grad()
    return model


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def reloaded(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


RIGHT: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": reloaded,
    "symbolic_trace": torch.fx.symbolic_trace,
    "jit.trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(model, (X,), strict=False).module(),
    "export, strict": lambda model: torch.export.export(model, (X,), strict=True).module(),
    "quantize_dynamic": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8),
    "fuse_modules": lambda model: torch.ao.quantization.fuse_modules(model.eval(), [["0", "1"]]),
    "one graph without gradients": lambda model: torch.no_grad()(compiled(model)),
}
TOLD: dict[str, Callable[[Any], Any]] = {"one graph": compiled, "jit.script": torch.jit.script}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found.requires_grad == expected.requires_grad


@pytest.mark.parametrize("prepare", [extend, used])
@pytest.mark.parametrize("way", RIGHT)
def test_the_result_is_that_of_a_model_without_hooks(way: str, prepare: Any) -> None:
    same(RIGHT[way](prepare(net()))(X), RIGHT[way](net())(X))


@pytest.mark.parametrize("way", ["jit.trace", "export"])
def test_what_is_written_down_has_no_hooks(way: str) -> None:
    operations = [str(RIGHT[way](model).graph).count("=") for model in (net(), used(net()))]
    assert operations[0] == operations[1]


@pytest.mark.parametrize("prepare", [extend, used])
@pytest.mark.parametrize("way", TOLD)
def test_or_the_message_names_the_way_out_and_that_is_one(way: str, prepare: Any) -> None:
    model = prepare(net())
    with pytest.raises(Exception, match=r"kfqn_ext\.unextend\(model\)"):
        TOLD[way](model)(X)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    same(TOLD[way](unextend(model))(X), net()(X))
