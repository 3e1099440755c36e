"""What docs/performance.md says is what the logs in results/, the networks' sizes and the code say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import floors, memory_parts, profile, report, rounding, scaling, tail, tried, ways
from benchmarks.problems import PROBLEMS, set_up
from benchmarks.targets import TARGETS, row
from workloads.cost_formulas import Frequencies, multiplications, state_numbers
from workloads.layer_sizes import LayerSize, layer_sizes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
WORDS = " ".join(PAGE.split())
PARTS = {
    "bench": report.render,
    "profile": profile.render,
    "scaling": scaling.render,
    "floors": floors.render,
    "ways": ways.render,
    "tried": tried.render,
    "rounding": rounding.render,
    "memory_parts": memory_parts.render,
    "tail": tail.render,
}
FILES = {part: ROOT / "results" / f"benchmarks-{part}.jsonl" for part in PARTS}
FILES["bench"] = ROOT / "results" / "benchmarks.jsonl"
LOGS = {part: json.loads(file.read_text()) for part, file in FILES.items() if file.exists()}


def block(part: str) -> str:
    """What stands between the marks of a part."""
    _, begin, rest = PAGE.partition(f"<!-- {part} -->")
    text, end, _ = rest.partition(f"<!-- end of {part} -->")
    assert begin and end
    return text.strip()


def sizes(problem: str) -> tuple[list[LayerSize], int]:
    """Of a network's layers, and of its minibatch."""
    setup = set_up(PROBLEMS[problem], torch.device("cpu"))
    return layer_sizes(setup.model, setup.x[:2]), len(setup.x)


def of_passes(layers: list[LayerSize], m: int) -> int:
    """Multiplications of forward and backward pass: three products a layer, and no gradient of the network's input."""
    products = [m * layer.groups * layer.I * layer.J * layer.T for layer in layers]
    return 3 * sum(products) - products[0]


def of_kbfgs(layers: list[LayerSize], m: int) -> dict[str, float]:
    return multiplications("kbfgs", layers, m, Frequencies())


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_the_marks(part: str) -> None:
    assert block(part)


def test_there_are_logs() -> None:
    assert "bench" in LOGS


@pytest.mark.parametrize("part", [part for part in PARTS if part in LOGS])
def test_tables_are_those_of_the_logs(part: str) -> None:
    assert block(part) == PARTS[part](LOGS[part])


def test_targets_are_those_of_the_logs() -> None:
    lines = (ROOT / "results/benchmarks-again.jsonl").read_text().splitlines()
    logs = [json.loads(line)["problems"] for line in lines]
    assert [list(log) for log in logs] == [["autoencoder"], ["resnet32"], ["vgg16"]]
    bench, again = LOGS["bench"]["problems"], {name: problem for log in logs for name, problem in log.items()}
    rows = [line.strip("| ").split(" | ") for line in block("again").splitlines() if "≤" in line]
    targets = {target.what: target for target in TARGETS}
    assert len(rows) == 12
    for what, limit, whole, few in rows:
        target = targets[what]
        values = (target.limit, target.value(bench[target.problem]), target.value(again[target.problem]))
        assert [limit, whole, few] == [f"≤ {values[0]:.2f}", f"{values[1]:.2f}", f"{values[2]:.2f}"]


def test_exponents_are_labelled_with_the_sizes_that_they_are_fitted_to() -> None:
    labels = [line.strip("| ").split(" | ")[0] for line in block("scaling").splitlines() if " to " in line]
    expected = []
    for name, sweep in scaling.SWEEPS.items():
        fitted = scaling.upper_half([scaling.size(name, stack) for stack in sweep])
        expected.append(f"{name} {fitted[0]} to {fitted[-1]}")
    assert labels == expected


def test_multiplications_of_the_autoencoder_s_direction() -> None:
    layers, m = sizes("autoencoder")
    direction, passes = (2e-9 * number for number in (of_kbfgs(layers, m)["direction"], of_passes(layers, m)))
    assert f"is {direction:.1f} GFLOP beside the gradient's {passes:.1f}," in WORDS


def test_why_resnet32_at_20_costs_what_it_does() -> None:
    layers, m = sizes("resnet32")
    count, rows = of_kbfgs(layers, m), LOGS["bench"]["problems"]["resnet32"]
    direction, forward = 1e-6 * count["direction"], 1e-6 * count["gradient"]
    assert f"is {direction:.0f} million multiplications beside the {forward:,.0f} of a forward pass" in WORDS
    assert f"which is {count['direction'] / of_passes(layers, m):.2f} of a step at the same rate" in WORDS
    for dtype in ("", ", bfloat16"):
        names = (f"K-BFGS, T = 1{dtype}", f"K-BFGS, a step that is not due{dtype}")
        due, ordinary = (row(rows, name)["time"] for name in names)
        more = due - ordinary
        assert f"A twentieth of the {more:.1f} that a due step costs besides is {more / 20:.2f}." in WORDS


def test_state_of_a_vgg16() -> None:
    layers, _ = sizes("vgg16")
    H_A, state = 4e-6 * state_numbers("kbfgs", layers)["A, H_A"], _state("vgg16", "K-BFGS, T = 20")
    assert f"is H_A, {H_A:.0f} of {1e-6 * state:.0f} MB" in WORDS


def _state(problem: str, title: str) -> Any:
    return row(LOGS["bench"]["problems"][problem], title)["state"]
