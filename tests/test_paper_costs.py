"""Measured costs, and the formulas beside them."""

from pathlib import Path

import pytest
import torch

from examples.paper import records
from examples.paper.cli import main
from examples.paper.costs.formulas import PAIRS, Frequencies, multiplications, state_numbers
from examples.paper.costs.measure import Bench
from examples.paper.costs.workload import LayerSize, layer_sizes, of_problem

CPU = torch.device("cpu")
LAYER = LayerSize(J=27, I=16, T=64, groups=1)


def test_layers_are_measured_as_they_run() -> None:
    workload = of_problem("resnet20-mnist", 2)
    net = workload.build()
    sizes = layer_sizes(net, workload.data(CPU)[0])
    assert sizes[0] == LayerSize(J=9, I=16, T=28 * 28, groups=1)
    assert sizes[-1] == LayerSize(J=65, I=10, T=1, groups=1)
    assert len(sizes) == 20


def test_formulas_are_those_of_table_4_and_table_5() -> None:
    assert state_numbers("kbfgs", [LAYER]) == {"∂W": 432, "∂W ⊙ ∂W": 0, "A, H_A": 729, "G, H_G": 256}
    assert state_numbers("kbfgsl", [LAYER])["G, H_G"] == PAIRS * 16
    assert state_numbers("adam", [LAYER, LAYER]) == {"∂W": 864, "∂W ⊙ ∂W": 864, "A, H_A": 0, "G, H_G": 0}
    m, freq = 10, Frequencies(T=4, T1=2)
    kbfgs = multiplications("kbfgs", [LAYER], m, freq)
    assert kbfgs["additional pass"] == m * 16 * 27 * 64 / 4
    assert kbfgs["curvature"] == (m * 27 * 64 + 27**2 + m * 16 * 64 + 16**2) / 4
    assert kbfgs["direction"] == 16 * 27**2 + 16**2 * 27
    kfac = multiplications("kfac", [LAYER], m, freq)
    assert kfac["curvature"] == m * (27**2 + 16**2) * 64 / 2 + (27**3 + 16**3) / 4
    assert multiplications("kbfgs20", [LAYER], m, freq)["curvature"] > kbfgs["curvature"]


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
