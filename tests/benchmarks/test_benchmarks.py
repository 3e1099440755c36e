"""The benchmarks run on small networks."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import compare, compiled, floors, memory, options, profile, rounding, scaling, tail, tried, turns, ways
from benchmarks.contenders import CONTENDERS, Contender, every, every_two
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from benchmarks.ready import Ready
from benchmarks.report import render
from benchmarks.targets import TARGETS
from tests.test_paper_report import ENVIRONMENT

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(directory: Path, *args: str) -> list[str]:
    files = ["--json", str(directory / "out/numbers.json"), "--figure", str(directory / "out/figure.png")]
    return ["--quick", "--device", "cpu", "--turns", "2", *files, *args]


def written(directory: Path, render: Callable[[dict], str], shown: str) -> dict:
    """The numbers, which are those of the tables that were shown, beside a figure."""
    assert next((directory / "out").glob("figure*.png")).read_bytes().startswith(b"\x89PNG")
    return logged(directory / "out/numbers.json", render, shown)


def shown_by(program: Any) -> Callable[[dict], str]:
    """What a program makes of its numbers, as the page shows it."""
    return partial(options.text, render=program.render)


def logged(path: Path, render: Callable[[dict], str], shown: str) -> dict:
    """The numbers of a log, which are those of the tables that were shown."""
    numbers = json.loads(path.read_text())
    assert render(numbers) == shown.strip()
    return numbers


@pytest.mark.usefixtures("one_thread")
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text("before <!-- bench --> old <!-- end of bench --> after")
    names = ["adam", "kbfgs", "kbfgs-bf16", "kfac"]
    chosen = ("--problem", "autoencoder", "--contenders", *names, "--docs", str(docs))
    compare.main(arguments(tmp_path, *chosen))
    shown = capsys.readouterr().out
    results = written(tmp_path, render, shown)
    rows = {row["row"]: row for row in results["problems"]["autoencoder"]["rows"]}
    assert [title for name in ["sgdm", *names] for title in CONTENDERS[name].rows] == list(rows)
    for title, row in rows.items():
        assert row["error"] is None and row["time"] > 0 and row["state"] > 0
        assert title in shown
        assert row["peak"] > 0 if Path("/proc/self/status").exists() else row["peak"] is None
    assert rows["Adam"]["state"] == pytest.approx(2 * rows["SGD-m"]["state"], rel=0.01)
    due, ordinary = rows["K-BFGS, T = 1"]["time"], rows["K-BFGS, a step that is not due"]["time"]
    assert rows["K-BFGS, T = 20"]["time"] == pytest.approx(0.95 * ordinary + 0.05 * due)
    assert results["problems"]["autoencoder"]["extraction"]["KBFGSQuantities(probe=…)"] > 0
    assert "| K-BFGS, T = 20 |" in docs.read_text() and "old" not in docs.read_text()


@pytest.mark.usefixtures("one_thread")
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    scaling.main(arguments(tmp_path))
    shown = capsys.readouterr().out
    results = written(tmp_path, shown_by(scaling), shown)
    assert list(results["sweeps"]) == ["batch", "width", "locations", "layers"]
    assert results["sweeps"]["batch"]["parts"]["additional pass"]["table_5"] == pytest.approx(1.0)
    assert "| locations 64 to 256 |" in shown


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["kbfgs", "kfac", "sgdm"])
def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture, method: str) -> None:
    profile.main(arguments(tmp_path, "--problem", "autoencoder", "--method", method))
    shown = capsys.readouterr().out
    (parts,) = written(tmp_path, shown_by(profile), shown)["seconds"].values()
    assert parts["gradient"] > 0
    assert all(part in shown for part in parts)
    if method != "sgdm":
        for part in ("update of H_A", "update of H_G", "product with H_A", "product with H_G", "second pass"):
            assert parts[part] > 0


@pytest.mark.filterwarnings("ignore")  # other packages use what torch has deprecated
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_runs_or_says_why_not(name: str) -> None:
    try:
        ready = CONTENDERS[name].build(set_up(QUICK["autoencoder"], CPU))
    except Exception as error:
        assert name in {"curvlinops", "singd", "asdfghjkl", "shampoo"}, error  # ours and torch's must run
        pytest.skip(turns.first_line(error))
    for kind in CONTENDERS[name].kinds:
        ready.steps[kind]()


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\nand more")

    times = turns.interleave({"base": lambda: None, "bad": fail}, "base", 3, CPU)
    assert times.errors == {"bad": "RuntimeError: no such kernel"}
    assert len(times.seconds["base"]) == 3 and not times.ratios["bad"]
    row = {"row": "bad", "time": None, "peak": None, "state": None, "error": times.errors["bad"]}
    problem = {"title": "p", "batch_size": 1, "turns": 3, "step_seconds": 1.0, "rows": [row], "steps": {}}
    problem["extraction"] = {"q": "no"}
    text = render({"quick": False, "problems": {"p": problem}, "command": "c", "environment": ENVIRONMENT})
    assert "| bad does not run: RuntimeError: no such kernel |" in text and "| q does not run: no |" in text


def test_rows_say_how_many_runs_they_are_medians_of() -> None:
    """Of the kinds of a mean step the one that ran least, less the first, where it is not the only one."""
    titles = {"K-BFGS, T = 20": 1, "K-BFGS, T = 1": 1, "K-BFGS, a step that is not due": 4, "Adam": 2}
    rows = [{"row": title, "time": 1.0, "peak": None, "state": None, "error": None} for title in titles]
    runs = {"kbfgs: ordinary": 5, "kbfgs: due": 1, "adam: ordinary": 3}
    problem = {"title": "p", "batch_size": 1, "turns": 5, "step_seconds": 1.0, "rows": rows, "extraction": {}}
    problem["steps"] = {kind: {"runs": number} for kind, number in runs.items()}
    text = render({"quick": False, "problems": {"p": problem}, "command": "c", "environment": ENVIRONMENT})
    for title, number in titles.items():
        assert f"| {title} | 1.00 | {number} |" in text


@pytest.mark.usefixtures("one_thread")
def test_what_runs_before_is_not_timed() -> None:
    done = []
    runs = {name: partial(done.append, name) for name in ("base", "other")}
    before = {"base": lambda: sum(range(10**7)), "other": lambda: done.append("before other")}
    times = turns.interleave(runs, "base", 2, CPU, before)
    assert done.count("before other") == 2
    assert all(done[done.index("other", i) - 1] == "before other" for i in (0, done.index("other") + 1))
    assert max(times.seconds["base"]) < 0.05  # the sum takes longer


@pytest.mark.usefixtures("one_thread")
def test_what_is_slow_runs_once() -> None:
    ticks = iter(range(10**6))
    times = turns.interleave({"base": lambda: next(ticks), "slow": lambda: sum(range(10**6))}, "base", 5, CPU)
    assert (len(times.seconds["base"]), len(times.seconds["slow"])) == (6, 1)


def test_ratios_are_to_the_base_right_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine that gets slower and slower, by the tick, changes no ratio."""
    now = 0.0

    def spend(work: float) -> None:
        nonlocal now
        now += work * (1.0 + now / 1000.0)

    monkeypatch.setattr(turns, "now", lambda device: now)
    runs = {"base": partial(spend, 1.0), "double": partial(spend, 2.0), "half": partial(spend, 0.5)}
    times = turns.interleave(runs, "base", 40, CPU)
    assert times.seconds["base"][-1] > 1.1 * times.seconds["base"][0]
    assert times.ratios["double"] == pytest.approx([2.0] * 40, rel=1e-3)
    assert times.ratios["half"] == pytest.approx([0.5] * 40, rel=1e-3)
    assert set(times.ratios["base"]) == {1.0}


def test_mean_steps_are_made_of_all_steps() -> None:
    assert sum(every(20).values()) == pytest.approx(1)
    assert every_two(10, 100) == pytest.approx({"ordinary": 0.9, "due": 0.09, "inverse": 0.01})


def test_state_is_what_the_optimizer_holds() -> None:
    setup = set_up(QUICK["autoencoder"], CPU)
    kept = torch.zeros(10)
    holds = {"mine": [kept, kept.view(2, 5)], "others": (setup.x, *setup.model.parameters()), "deep": nn.Linear(3, 2)}
    assert memory.held_bytes(holds, setup) == 4 * (10 + 6 + 2)


def test_the_peak_is_what_was_held_at_once() -> None:
    peak = memory._peak_of_process()
    for _ in range(3):
        torch.ones(16 * 10**6)
    found = peak()
    assert 60e6 < found < 120e6 if Path("/proc/self/status").exists() else found is None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
def test_another_package_s_code_is_not_what_its_optimizer_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_package.py").write_text("import torch\n\ncode = torch.ones(16 * 10**6)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build(setup: Setup) -> Ready:
        import_module("large_package")
        return CONTENDERS["sgdm"].build(setup)

    monkeypatch.setitem(CONTENDERS, "large", Contender(build, {"large": {"ordinary": 1}}, "large_package"))
    assert memory._measure_here("large", "autoencoder", True, "cpu").peak < 32e6


def test_slopes() -> None:
    assert scaling.slope([1, 2, 4, 8], [5, 3, 16, 64]) == pytest.approx(2)
    assert math.isnan(scaling.slope([1, 2], [0, 1]))


def test_targets_are_of_problems_and_rows_that_exist() -> None:
    titles = [title for contender in CONTENDERS.values() for title in contender.rows]
    for target in TARGETS:
        assert target.problem in PROBLEMS
        rows = [{"row": title, "time": 1.0, "state": 1} for title in titles]
        assert target.value({"rows": rows, "extraction": {"KBFGSQuantities(probe=…)": 1.0}}) == 1.0
        assert target.value({"rows": [], "extraction": {}}) is None


def test_what_rounding_does(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On a small autoencoder: a row a layer, errors of the size of bfloat16's, nothing lost of the descent."""
    docs = tmp_path / "docs.md"
    docs.write_text("<!-- rounding --> old <!-- end of rounding -->")
    log = tmp_path / "log.json"
    rounding.main(["--problem", "digits", "--steps", "5", "--docs", str(docs), "--json", str(log)])
    shown = capsys.readouterr().out
    logged(log, shown_by(rounding), shown)
    rows = [line for line in shown.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6 and all(row in docs.read_text() for row in rows)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert 1e-4 < float(cells[1]) < 0.1 and abs(float(cells[3]) - 1) < 0.05


@pytest.mark.usefixtures("one_thread")
def test_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tried.main(["--quick", "--json", str(tmp_path / "log.json")])
    shown = capsys.readouterr().out
    logged(tmp_path / "log.json", shown_by(tried), shown)
    rows = [line.strip("|").split("|") for line in shown.splitlines() if line[:3] in ("| 6", "| 1")]
    assert [row[0].strip() for row in rows] == ["64×577", "10 of 16×145"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_what_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with torch.compiler.config.patch(force_disable_caches=True):  # which the program sets for its process
        compiled.main(["--quick", "--json", str(tmp_path / "log.json")])
    ((what, *numbers),) = logged(tmp_path / "log.json", shown_by(compiled), capsys.readouterr().out)["rows"]
    assert "spectral" in what and all(number > 0 for number in numbers)
    eager, _ = compiled.whole_step(False)
    assert eager > 0


@pytest.mark.usefixtures("one_thread")
def test_ways_to_products(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ways.main(["--batch", "2", "--json", str(tmp_path / "log.json")])
    shown = capsys.readouterr().out
    logged(tmp_path / "log.json", shown_by(ways), shown)
    rows = [line.strip("|").split("|") for line in shown.splitlines() if "×" in line]
    assert len(rows) == len(ways.SIZES) + len(ways.VECTORS)
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.usefixtures("one_thread")
def test_the_second_pass_of_the_tail(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tail.main(["--steps", "4", "--seeds", "2", "--json", str(tmp_path / "log.json")])
    runs = logged(tmp_path / "log.json", shown_by(tail), capsys.readouterr().out)["runs"]
    assert [len(of_way) for of_way in runs.values()] == [2, 2]
    for (whole, _), (last, _) in zip(*runs.values(), strict=True):
        assert 0 < abs(whole - last) < 0.5 * whole  # another pair, and nearly the same steps


@pytest.mark.usefixtures("one_thread")
def test_floors(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    floors.main(["--quick", "--device", "cpu", "--turns", "2", "--json", str(tmp_path / "log.json")])
    found = logged(tmp_path / "log.json", shown_by(floors), capsys.readouterr().out)["floors"]
    assert set(found) == {floor.row for floor in floors.FLOORS}
    for ratios in found.values():
        # Not which is larger: on small networks that is noise, where a processor has no bfloat16 arithmetic.
        assert min(ratios["floor"], ratios["measured"]) > 1


def test_floors_do_what_has_to_be_done() -> None:
    setup = set_up(QUICK["autoencoder"], CPU)
    weights = [p for p in setup.model.parameters() if p.ndim == 2]
    before = [p.detach().clone() for p in setup.model.parameters()]
    directions = floors._directions(torch.bfloat16, setup)()
    assert [p.shape for p in directions] == [(w.shape[0], w.shape[1] + 1) for w in weights]
    floors._learning_and_measuring(0.25, setup)()
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(setup.model.parameters(), before, strict=True))


def test_floors_are_of_the_device_that_is_asked_for() -> None:
    setup = set_up(QUICK["autoencoder"], torch.device("meta"))
    assert {p.device.type for p in floors._directions(torch.bfloat16, setup)()} == {"meta"}
    floors._learning_and_measuring(0.25, setup)()  # tensors of two devices would not multiply
