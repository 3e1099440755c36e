"""What a step would launch on a GPU, counted on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import launches, options
from benchmarks.contenders import CONTENDERS
from benchmarks.parts import MEASURING, PARTS, told_apart
from benchmarks.problems import QUICK, set_up
from kfqn_ext.geometry import conv
from kfqn_ext.linalg import low_rank
from kfqn_ext.optim import Minibatch, gate, optimizer
from kfqn_ext.optim.descent import descend
from workloads.operations import Load, Operations

CPU = torch.device("cpu")


def test_the_table_is_that_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    launches.main(["--quick", "--problem", "vgg16", "--json", str(tmp_path / "log.json")])
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "log.json").read_text())
    assert options.text(found, launches.render) == shown.strip()
    (steps,) = found["problems"].values()
    assert set(steps) >= {"SGD-m", "Adam", "K-BFGS, one pass, due", "K-BFGS, not due", "K-BFGS as printed, due"}
    for step in steps.values():
        assert set(step["parts"]) <= set(PARTS)
        assert sum(sum(parts.values()) for parts in step["layers"].values()) > 0 or not step["layers"]
    due = steps["K-BFGS, due"]["parts"]
    assert all(due[part]["launches"] > 0 for part in PARTS)
    assert all(sum(parts.values()) < 60 for step in steps.values() for parts in step["layers"].values())


@pytest.mark.parametrize("kind", ["ordinary", "due"])
def test_the_parts_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "launches_count", lambda x: True)
    for module in (gate, low_rank):
        monkeypatch.setattr(module, "is_on_host", lambda t: False)
    one, other = (set_up(QUICK["vgg16"], CPU) for _ in range(2))
    step, same = (CONTENDERS["untuned"].build(setup).steps[kind] for setup in (one, other))
    step()
    with Operations() as plain:
        step()
    counted = launches._of_step(same, other.model)["parts"]  # of the second step too
    assert sum(load["launches"] for load in counted.values()) == plain.number
    assert (MEASURING in counted) is (kind == "due")


def test_what_is_wrapped_is_unwrapped() -> None:
    setup = set_up(QUICK["autoencoder"], CPU)
    with told_apart(Operations(), setup.model):
        assert optimizer.descend is not descend and hasattr(Minibatch.__call__, "__wrapped__")
    assert optimizer.descend is descend and not hasattr(Minibatch.__call__, "__wrapped__")


def test_the_work_of_a_product() -> None:
    x, y = torch.rand(3, 4), torch.rand(4, 5)
    operations = Operations()
    with operations, operations.part("product"):
        x @ y
        x.view(2, 6).unbind()
    assert operations.load == {("product", ""): Load(1, 4 * (12 + 20 + 15), 2 * 3 * 4 * 5)}
    assert launches.seconds(Load(2, 0, 0)) == (2 * launches.LAUNCH, 0, 0)


def test_parts_inside_of_parts() -> None:
    operations = Operations()
    with operations, operations.part("outer"):
        torch.ones(2)
        with operations.part("inner", "layer"):
            torch.ones(2)
        torch.ones(2)
    assert {part: load.launches for part, load in operations.load.items()} == {("outer", ""): 2, ("inner", "layer"): 1}
