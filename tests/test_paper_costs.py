"""Measured costs, and the formulas beside them."""

from pathlib import Path

import pytest
import torch

from examples.paper.cli import main
from examples.paper.costs import render_costs
from tests.test_paper_report import ENVIRONMENT
from workloads import records
from workloads.bench import Bench
from workloads.cost_formulas import (
    PAIRS,
    STATE_PARTS,
    TIME_PARTS,
    Frequencies,
    multiplications,
    state_numbers,
)
from workloads.layer_sizes import LayerSize, layer_sizes
from workloads.methods import METHODS
from workloads.workload import of_problem

CPU = torch.device("cpu")
LAYER = LayerSize(J=27, I=16, T=64, groups=1)


def test_layers_are_measured_as_they_run() -> None:
    workload = of_problem("resnet20-mnist", 2)
    net = workload.build()
    sizes = layer_sizes(net, workload.data(CPU)[0])
    assert sizes[0] == LayerSize(J=9, I=16, T=28 * 28, groups=1)
    assert sizes[-1] == LayerSize(J=65, I=10, T=1, groups=1)
    assert len(sizes) == 20


J, I, LOCATIONS = LAYER.J, LAYER.I, LAYER.T  # noqa: E741
M, T, T1, T2 = 10, 4, 2, 8
P = PAIRS
# The columns of table_4, and those of table_5 behind the minibatch gradient, for each row of both.
TABLE_4 = {
    "kbfgs": (I * J, 0, J**2, I**2),
    "kbfgsl": (I * J, 0, J**2, P * I),
    "kfac": (I * J, 0, J**2, I**2),
    "adam": (I * J, I * J, 0, 0),
}
TABLE_5 = {
    "kbfgs": (
        M * I * J * LOCATIONS / T,
        (M * J * LOCATIONS + J**2 + M * I * LOCATIONS + I**2) / T,
        I * J**2 + I**2 * J,
    ),
    "kbfgsl": (
        M * I * J * LOCATIONS / T,
        (M * J * LOCATIONS + J**2 + M * I * LOCATIONS + P * I) / T,
        I * J**2 + P * I * J,
    ),
    "kfac": (
        M * I * J * LOCATIONS / T1,
        M * (J**2 + I**2) * LOCATIONS / T1 + (J**3 + I**3) / T2,
        I * J**2 + I**2 * J,
    ),
    "adam": (0, I * J, I * J),
}
# Of those that the paper has no row for, what differs from the row of another.
SAME_STATE = {
    "kbfgs20": "kbfgs",
    "kbfgsl20": "kbfgsl",
    "provable": "kbfgsl",
    "adam-2020": "adam",
    "kbfgs-part": "kbfgs",
}
OTHER_CURVATURE = {
    "kbfgs20": (M * J**2 * LOCATIONS + J**2 + M * I * LOCATIONS + I**2) / T,
    "kbfgsl20": (M * J**2 * LOCATIONS + J**2 + M * I * LOCATIONS + P * I) / T,
    "kbfgs-moving-a": (M * J**2 * LOCATIONS + J**2 + M * I * LOCATIONS + I**2) / T,
    "kbfgs-no-dpdlm": TABLE_5["kbfgs"][1],
    "kbfgs-trace": TABLE_5["kbfgs"][1],
    "kbfgs-limited-a": (M * J * LOCATIONS + P * J + M * I * LOCATIONS + I**2) / T,
    "provable": (M * J**2 * LOCATIONS + J**3 + M * I * LOCATIONS + P * I) / T,
    "adam-2020": I * J,
    "sgdm": 0,
}


def test_formulas_are_those_of_table_4_and_table_5() -> None:
    for method, row in TABLE_4.items():
        assert tuple(state_numbers(method, [LAYER]).values()) == row, method
        freq = Frequencies(T=T2, T1=T1) if method == "kfac" else Frequencies(T=T)
        gradient, *rest = multiplications(method, [LAYER], M, freq).values()
        assert gradient == M * I * J * LOCATIONS and tuple(rest) == pytest.approx(TABLE_5[method]), method
    assert state_numbers("adam", [LAYER, LAYER])["∂W"] == 2 * I * J


def test_other_methods_have_the_formulas_of_their_sides() -> None:
    for method, same in SAME_STATE.items():
        assert tuple(state_numbers(method, [LAYER]).values()) == TABLE_4[same], method
    assert tuple(state_numbers("kbfgs-limited-a", [LAYER]).values()) == (I * J, 0, P * J, I**2)
    assert tuple(state_numbers("sgdm", [LAYER]).values()) == (I * J, 0, 0, 0)
    for method, curvature in OTHER_CURVATURE.items():
        assert multiplications(method, [LAYER], M, Frequencies(T=T))["curvature"] == pytest.approx(curvature), method
    assert multiplications("kbfgs-limited-a", [LAYER], M, Frequencies())["direction"] == P * I * J + I**2 * J
    assert multiplications("provable", [LAYER], M, Frequencies())["direction"] == I * J**2 + P * I * J
    for first_order in ("adam-2020", "sgdm"):
        assert multiplications(first_order, [LAYER], M, Frequencies())["additional pass"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_measured_and_has_formulas(method: str) -> None:
    """Warnings are errors: a second pass that is not the method's own teaches it nothing, and it says so."""
    workload = of_problem("digits", 8)
    bench = Bench(workload, method, Frequencies(T=2), CPU)
    costs = bench.measure(repeats=1, steps=2)
    layers = layer_sizes(bench.model, workload.data(CPU)[0])
    for part, numbers in state_numbers(method, layers).items():
        assert (costs.state[part] > 0) == (numbers > 0), part
    assert costs.seconds["gradient"] > 0
    assert (costs.seconds["additional pass"] > 0) == (not METHODS[method].first_order)


@pytest.mark.parametrize(("method", "data"), [("kbfgs-part", 2), ("kfac-part", 2), ("kbfgs", 8), ("kfac", 8)])
def test_the_second_pass_is_timed_on_the_data_that_the_method_takes(method: str, data: int) -> None:
    bench = Bench(of_problem("digits", 8), method, Frequencies(), CPU)
    bench.measure(repeats=1, steps=0)
    seen: list[int] = []
    bench.model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    bench._pass_alone()
    assert seen == [data]


def test_costs_are_compared_under_one_condition(tmp_path: Path) -> None:
    """Workload, batch size, steps and device: whichever differs, lines are not beside each other."""
    side = {"kind": "costs", "method": "sgdm", "T": 1, "T1": 1, "command": "made up", "iteration": 0.5}
    parts = {
        **{name: dict.fromkeys(STATE_PARTS, 1.0) for name in ("state", "state_formula")},
        **{name: dict.fromkeys(TIME_PARTS, 1.0) for name in ("seconds", "multiplications")},
    }
    first = {"workload": "net", "batch_size": 8, "steps": 3, "environment": ENVIRONMENT}
    others = [
        {"workload": "another"},
        {"batch_size": 64},
        {"steps": 7},
        {"environment": ENVIRONMENT | {"device": "NVIDIA H100"}},
    ]
    for line in [first, *(first | other for other in others), first | {"method": "adam"}]:
        records.append(tmp_path / "costs.jsonl", side | parts | line)
    text = render_costs(tmp_path / "costs.jsonl")
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(set(headings)) == len(headings) == 5
    assert headings[0] == "### net, minibatches of 8, 3 whole iterations, CPU"
    _, beside, *alone = text.split("### ")
    assert "| Adam |" in beside and "| SGD-m |" in beside
    assert all("| Adam |" not in part and "| SGD-m |" in part for part in alone)


@pytest.mark.parametrize("method", ["kbfgs", "adam", "sgdm"])
def test_the_state_has_the_formula_s_size(method: str) -> None:
    workload = of_problem("digits", 8)
    bench = Bench(workload, method, Frequencies(), CPU)
    state = bench.measure(repeats=1, steps=0).state
    formula = state_numbers(method, layer_sizes(bench.model, workload.data(CPU)[0]))
    for part in ("∂W", "∂W ⊙ ∂W", "A, H_A"):
        assert state[part] == pytest.approx(4 * formula[part], rel=0.01)
    assert state["G, H_G"] == pytest.approx(4 * formula["G, H_G"], rel=0.2)  # the pairs' moving averages come on top


def test_rare_events_are_divided_by_their_frequency() -> None:
    bench = Bench(of_problem("digits", 8), "kbfgs", Frequencies(T=10), CPU)
    parts = bench._by_part({
        "ordinary gradient": 1.0, "ordinary direction": 2.0, "due gradient": 1.5, "due direction": 2.0,
        "due second pass": 7.0, "due additional pass": 4.0,
    })  # fmt: skip
    assert parts == {"gradient": 1.0, "direction": 2.0, "additional pass": 0.4, "curvature": pytest.approx(0.35)}


def test_costs_are_printed_for_a_problem_and_for_any_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "costs.jsonl"
    options = ["--methods", "kbfgs", "sgdm", "--batch-size", "4", "--repeats", "1", "--threads", "1", "--out", str(out)]
    main(["costs", "--problems", "digits", "--steps", "2", *options])
    any_model = ["--model", "torchvision.models:squeezenet1_1", "--input-shape", "3", "32", "32", "--classes", "1000"]
    main(["costs", *any_model, *options])
    assert len(records.read(out)) == 4
    main(["report", str(out), "--page", str(tmp_path / "page.md")])
    assert "÷ SGD-m" in (tmp_path / "page.md").read_text()
