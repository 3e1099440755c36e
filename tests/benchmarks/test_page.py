"""What docs/performance.md says is what the logs in results/, the networks' sizes and the code say."""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import options, page, report
from benchmarks.problems import PROBLEMS, set_up
from benchmarks.scaling import SWEEPS, size, upper_half
from benchmarks.targets import row
from benchmarks.time_to_loss import report as time_to_loss
from workloads.cost_formulas import Frequencies, multiplications, state_numbers
from workloads.layer_sizes import LayerSize, layer_sizes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
WORDS = " ".join(PAGE.split())
PROGRAMS = {name: import_module(f"benchmarks.{name}") for name in page.PARTS}
PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "bench": report.render,
    "float32": report.render,
    "time to loss": partial(options.text, render=time_to_loss.render),
    **{name: partial(options.text, render=program.render) for name, program in PROGRAMS.items()},
}
FILES = {name: ROOT / page.log(name) for name in page.PARTS}
FILES |= {
    "bench": ROOT / "results/benchmarks.jsonl",
    "float32": ROOT / "results/benchmarks-float32.jsonl",
    "time to loss": ROOT / "results/time-to-loss.jsonl",
}
LOGS = {part: json.loads(file.read_text()) for part, file in FILES.items()}


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


@pytest.mark.parametrize("part", PARTS)
def test_tables_are_those_of_the_logs(part: str) -> None:
    assert block(part) == PARTS[part](LOGS[part])


def ranked(problem: str, loss: float) -> list[str]:
    """Optimizers by the median of their seconds to a loss, who does not come there last."""
    race = LOGS["time to loss"]["problems"][problem]
    place = race["losses"].index(loss)

    def seconds(name: str) -> float:
        times = (seed["reached"][place] for seed in race["rows"][name]["seeds"])
        return statistics.median(math.inf if time is None else time for time in times)

    return sorted(race["rows"], key=seconds)


def test_who_is_first_at_a_loss() -> None:
    muon, rounded, kfac = "Muon, and AdamW for the rest", "K-BFGS, one pass, bfloat16 directions", "KFAC"
    assert (
        "it is tuned Muon on the autoencoder. On the VGG SOAP is first at 0.3, and Muon below. On the ResNet Muon"
        in WORDS
    )
    assert {ranked("autoencoder", loss)[0] for loss in (150.0, 110.0, 90.0)} == {muon}
    assert [ranked("vgg", loss)[0] for loss in (0.3, 0.1, 0.05)] == ["SOAP", muon, muon]
    assert "On the ResNet Muon is first at 0.3" in WORDS
    assert ranked("resnet", 0.3)[0] == muon
    assert "and the one-pass rows at 0.1, with nothing tuned" in WORDS
    assert all("one pass" in name for name in ranked("resnet", 0.1)[:4])
    assert "the one-pass K-BFGS is second at 150 and 110 where its directions are in bfloat16" in WORDS
    assert [ranked("autoencoder", loss)[1] for loss in (150.0, 110.0, 90.0)] == [rounded, rounded, kfac]
    assert "At 90 it is `KFAC`, also with nothing tuned." in WORDS
    assert "On the VGG the one-pass rows come to 0.05 right after Muon, and before Adam." in WORDS
    at_the_end = ranked("vgg", 0.05)
    assert all("one pass" in name for name in at_the_end[1:4]) and at_the_end.index("Adam") > 4


def test_exponents_are_labelled_with_the_sizes_that_they_are_fitted_to() -> None:
    labels = [line.strip("| ").split(" | ")[0] for line in block("scaling").splitlines() if " to " in line]
    expected = []
    for name, sweep in SWEEPS.items():
        fitted = upper_half([size(name, stack) for stack in sweep])
        expected.append(f"{name} {fitted[0]} to {fitted[-1]}")
    assert labels == expected


def test_multiplications_of_the_autoencoder_s_direction() -> None:
    layers, m = sizes("autoencoder")
    direction, passes = (2e-9 * number for number in (of_kbfgs(layers, m)["direction"], of_passes(layers, m)))
    assert f"is {direction:.1f} GFLOP beside the gradient's {passes:.1f}." in WORDS


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


# ------------------------------------------------------------------ all parts again


class Parsed(Exception):
    """The command line was taken."""


@pytest.mark.parametrize("name", page.PARTS)
def test_programs_take_the_options_that_they_are_called_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any) -> None:
        raise Parsed(parse(self, *args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed) as parsed:
        PROGRAMS[name].main(page.PARTS[name].arguments(name, Path("data")))
    options = parsed.value.args[0]
    assert (options.docs, options.json) == (page.DOCS, page.log(name))


def test_how_long_emulated_products_take() -> None:
    muon = row(LOGS["float32"]["problems"]["autoencoder"], "Muon, and AdamW for the rest")["time"]
    assert f"on the autoencoder its step takes {muon:.0f} times as long as SGD-m's" in WORDS


def test_what_it_gains_to_compile() -> None:
    rows = {what: numbers for what, *numbers in LOGS["compiled"]["rows"]}
    small = [rows[what] for what in ("spectral norms, nine layers of 64×65", "five pairs of each H_A, nine layers")]
    gains, seconds = sorted(eager / fast for eager, fast, _ in small), sorted(first for *_, first in small)
    assert [round(gain) for gain in gains] == [4, 5] and "layers become four to five times faster" in WORDS
    assert f"after {seconds[0]:.0f} to {seconds[1]:.0f} seconds of compiling" in WORDS
    for what in ("five pairs of each H_A, a ResNet32", "`OnePassKBFGS.step`, nine layers"):
        eager, fast, first = rows[what]
        assert fast > eager and round(first / 60) == 4


def test_what_few_vectors_gain_as_rows() -> None:
    shares: dict[tuple[int, bool], list[float]] = {}
    for _, d, k, *times in LOGS["ways"]["vectors"]:
        shares.setdefault((d, k > 1), []).extend(rows / columns for columns, rows in (times[:2], times[2:]))
    wide = [share for (d, several), found in shares.items() if several and d >= 577 for share in found]
    assert "From 577 inputs on, several rows take a quarter to a seventh of the time of columns." in WORDS
    assert round(1 / max(wide)) == 4 and round(1 / min(wide)) == 7
    assert max(wide) < min(shares[65, True]) and max(shares[65, True]) < 1
    assert all(0.9 < share < 1.1 for share in shares[785, False])


@pytest.mark.parametrize("name", page.PARTS)
def test_sections_are_on_the_page(name: str) -> None:
    heads = [line.lstrip("# ").lower().replace(" ", "-") for line in PAGE.splitlines() if line.startswith("#")]
    assert page.PARTS[name].section in heads


def test_the_list_of_logs_is_that_of_those_that_are_there() -> None:
    text = (ROOT / "results/README.md").read_text()
    between = text.partition(f"<!-- {page._MARK} -->")[2].partition(f"<!-- end of {page._MARK} -->")[0]
    assert between.strip() == page.listed()


def test_a_program_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(command: list[str], **unused: Any) -> SimpleNamespace:
        ran.append(command[2])
        (tmp_path / page.log(command[2].rpartition(".")[2])).touch()
        return SimpleNamespace(returncode=int(command[2] == "benchmarks.ways"))

    (tmp_path / "results").mkdir()
    (tmp_path / "results/README.md").write_text(f"<!-- {page._MARK} --><!-- end of {page._MARK} -->")
    monkeypatch.setattr(page, "_ROOT", tmp_path)
    monkeypatch.setattr(page, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    assert page.main(["--parts", "ways", "tried"]) == 1
    assert ran == ["benchmarks.ways", "benchmarks.tried"]
    assert "failed: ways" in capsys.readouterr().out
    listed = (tmp_path / "results/README.md").read_text()
    assert "`benchmarks-tried.jsonl`" in listed and "`benchmarks-floors.jsonl`" not in listed
