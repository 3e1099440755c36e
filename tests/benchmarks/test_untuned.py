"""The benchmark of optimizers without tuning: its runs, its protocol and its scores."""

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.untuned import log, scores, working
from benchmarks.untuned.choice import CHOICE
from benchmarks.untuned.command import main
from benchmarks.untuned.data import ALPHABET, Source, program_text
from benchmarks.untuned.entry import Entry, rates
from benchmarks.untuned.held_out import HELD_OUT
from benchmarks.untuned.lists import ENTRIES, PROBLEMS, SETS
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.peers import PEERS, FlatMuon, hidden_weights
from benchmarks.untuned.problem import mean_loss, minibatches
from benchmarks.untuned.protocol import Protocol
from benchmarks.untuned.report import render
from benchmarks.untuned.training import summary, train
from benchmarks.untuned.wide import WIDE

ROOT = Path(__file__).parents[2]
QUICK = Source(quick=True)
PROTOCOL = Protocol((200, 800), (0, 1, 2))
# Other packages use what torch has deprecated, and a rate that is too large is worth a warning.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(directory: Path, *more: str, jobs: int = 1) -> list[str]:
    chosen = ["--problems", "deepmlp", "tabular", "--optimizers", "adam", "muon", "kbfgs"]
    return ["--quick", "--jobs", str(jobs), "--log", str(directory / "log.jsonl"), *chosen, *more]


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def keys(records: list[dict]) -> Counter[str]:
    return Counter(json.dumps([r[k] for k in ("problem", "optimizer", "setting", "steps", "seed")]) for r in records)


# ---------------------------------------------------------------------- the whole of it


def test_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text("<!-- untuned choice --> old <!-- end of untuned choice -->")
    outputs = ["--json", str(tmp_path / "numbers.json"), "--figure", str(tmp_path / "figure.png"), "--docs", str(docs)]
    main(arguments(tmp_path, *outputs, "--seeds", "0", "1"))
    results = json.loads((tmp_path / "numbers.json").read_text())
    assert render(results) in capsys.readouterr().out and render(results) in docs.read_text()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    records = lines(tmp_path)
    assert max(keys(records).values()) == 1
    assert sum(r["steps"] for r in records if r["steps"] in (2, 4)) == 2 * sum(
        Protocol((2, 4), (0, 1)).steps(ENTRIES[name]) for name in ("adam", "muon", "kbfgs")
    )
    assert len(results["cells"]) == 2 * 2 * 3  # lengths, problems, optimizers
    assert all(len(cell["losses"]) == 2 and not cell["error"] for cell in results["cells"])
    firsts = {(r["problem"], r["seed"], r["initial"]) for r in records}
    assert len(firsts) == 4  # whatever the optimizer: the same parameters and the same minibatch


def test_what_is_finished_does_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(arguments(tmp_path))
    before = (tmp_path / "log.jsonl").read_bytes()

    def refuse(*run: object) -> dict:
        raise AssertionError(run)

    monkeypatch.setattr(working, "train", refuse)
    main(arguments(tmp_path))
    assert (tmp_path / "log.jsonl").read_bytes() == before
    (tmp_path / "log.jsonl").rename(tmp_path / "peers.jsonl")
    main(arguments(tmp_path, "--known", str(tmp_path / "peers.jsonl")))
    assert not (tmp_path / "log.jsonl").exists()


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    main(arguments(tmp_path))
    whole = lines(tmp_path)
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    main(arguments(tmp_path))
    *kept, half, last = path.read_text().splitlines()
    with pytest.raises(ValueError, match="delimiter|Unterminated|Expecting"):
        json.loads(half)
    assert keys([*map(json.loads, kept), json.loads(last)]) == keys(whole)


def test_processes_that_are_killed_leave_no_gap_and_run_nothing_twice(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.untuned", *arguments(tmp_path, jobs=2)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not log.read([tmp_path / "log.jsonl"], quick=True):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = log.read([tmp_path / "log.jsonl"], quick=True)
    main(arguments(tmp_path))
    found = log.read([tmp_path / "log.jsonl"], quick=True)
    whole = [record for record in found.values() if record["steps"] in (2, 4)]
    assert 0 < len(before) < len(whole) == 2 * (8 + 8 + 2)
    assert all(found[key] == record for key, record in before.items())
    assert max(keys(list(found.values())).values()) == 1


def test_two_programs_do_not_write_to_one_log(tmp_path: Path) -> None:
    with log.held(tmp_path / "log.jsonl"), pytest.raises(SystemExit, match="Another run"):
        main(arguments(tmp_path))


def test_quick_runs_are_not_taken_for_real_ones(tmp_path: Path) -> None:
    main(arguments(tmp_path))
    assert log.read([tmp_path / "log.jsonl"], quick=True) and not log.read([tmp_path / "log.jsonl"], quick=False)


# ---------------------------------------------------------------------- problems and optimizers


@pytest.mark.parametrize(
    "problem", [*CHOICE, *(pytest.param(p, marks=pytest.mark.slow) for p in (*HELD_OUT, "mlp-1", "cnn-1"))]
)
def test_every_optimizer_trains_every_problem_or_says_why_not(problem: str) -> None:
    initial = set()
    for name, entry in ENTRIES.items():
        record = train(PROBLEMS[problem], entry, entry.grid[0], 2, 0, QUICK)
        if entry.samples and not PROBLEMS[problem].samples:
            assert "no distribution" in record["error"] and not record["curve"]
            continue
        if name in ("soap", "shampoo"):
            pytest.importorskip("pytorch_optimizer")
        assert record["error"] is None and math.isfinite(record["final"]) and math.isfinite(record["valid"])
        initial.add(record["initial"])
    assert len(initial) == 1


def test_there_are_seven_problems_to_choose_on_and_others_that_are_held_out() -> None:
    assert list(SETS["choice"]) == ["lenet", "deepmlp", "regression", "vggbn", "resnet", "ae", "gpt"]
    assert len(SETS["held-out"]) >= 6 and len(PROBLEMS) == len(CHOICE) + len(HELD_OUT) + len(WIDE)
    assert {len(entry.grid) for entry in PEERS.values()} == {5}


def test_all_optimizers_get_the_same_minibatches() -> None:
    seen: dict[tuple[str, int], list[float]] = {}

    def train_seen(name: str, seed: int) -> None:
        def step(optimizers, batch):
            seen.setdefault((name, seed), []).append(batch.x.sum().item())
            return ENTRIES[name].step(optimizers, batch)

        entry = ENTRIES[name]
        train(PROBLEMS["vae"], replace(entry, step=step), entry.grid[0], 30, seed, QUICK)

    for name in ("adam", "muon", "kbfgs"):
        train_seen(name, 0)
    train_seen("adam", 1)
    assert len(seen["adam", 0]) == 30
    assert seen["adam", 0] == seen["muon", 0] == seen["kbfgs", 0] != seen["adam", 1]


def test_an_epoch_has_each_datum_once() -> None:
    problem = replace(PROBLEMS["deepmlp"], batch_size=500)
    data, model = problem.data(QUICK), problem.build()
    x = torch.cat([batch.x for batch in islice(minibatches(problem, model, data, 0), 3)]).flatten(1)
    assert torch.equal(x.sum(0).round(), data.train.x.flatten(1).sum(0).round()) and len(x) == 1500


def test_text_is_of_the_standard_library_and_targets_are_what_follows() -> None:
    train, valid = vars(program_text(8)).values()
    assert torch.equal(train.x[1], train.y[0]) and len(train) > 150_000
    assert "".join(ALPHABET[c] for c in torch.cat([train.x[0], train.y[3]])) == "# Moduledule doc"
    assert not torch.equal(valid.x[0], train.x[-1])


def test_validation_changes_nothing() -> None:
    problem = PROBLEMS["vae"]
    data, model = problem.data(QUICK), problem.build()
    state = torch.get_rng_state()
    first = mean_loss(problem, model, data.valid)
    assert first == mean_loss(problem, model, data.valid) and model.training
    assert torch.equal(state, torch.get_rng_state())


def test_muon_has_hidden_weights_and_adamw_the_rest() -> None:
    model = PROBLEMS["resnet"].build()
    muon, adamw = PEERS["muon"].build(model, lr=0.1)
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    hidden = hidden_weights(model)
    assert {id(p) for p in model.parameters()} == rest | {id(w) for w in hidden} and not rest & {id(w) for w in hidden}
    assert any(w.ndim == 4 for w in hidden) and id(model[-1].weight) in rest
    assert [flat.shape for flat in muon.param_groups[0]["params"]] == [(len(w), w[0].numel()) for w in hidden]


def test_muon_moves_a_convolution_as_the_matrix_that_it_is() -> None:
    convolution, matrix = nn.Conv2d(3, 4, 2), nn.Linear(12, 4)
    matrix.weight.data.copy_(convolution.weight.detach().flatten(1))
    moved, plain = FlatMuon([convolution.weight], lr=0.1), torch.optim.Muon([matrix.weight], lr=0.1)
    for _ in range(3):
        grad = torch.randn(4, 3, 2, 2)
        convolution.weight.grad, matrix.weight.grad = grad, grad.flatten(1)
        moved.step()
        plain.step()
    assert torch.equal(convolution.weight.flatten(1), matrix.weight)


# ---------------------------------------------------------------------- protocol


def record(run: Trial, final: float | None, seconds: float = 1.0, **more: object) -> dict:
    curve = [[1, 0.1 * seconds, 2.0], [run.steps, seconds, final]]
    known = {"final": final, "valid": final, "diverged": final is None, "error": None, "seconds": seconds}
    return {**asdict(run), **known, "curve": curve, **more}


def finish(entry: Entry, best: int, found: Found) -> list[Trial]:
    """Run all that is due, where one setting is better the nearer it is to the best."""
    done: list[Trial] = []
    while due := PROTOCOL.due("p", "o", entry, found):
        for run in due:
            found[run.key] = record(run, 0.1 + abs(entry.grid.index(run.setting) - best))
        done += due
    return done


@pytest.mark.parametrize(("best", "window"), [(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (1, 2, 3)), (4, (2, 3, 4))])
def test_peers_have_equally_many_trials(best: int, window: tuple[int, ...]) -> None:
    entry = Entry("o", lambda model: (), rates(1, 2, 3, 4, 5))
    found: Found = {}
    runs = finish(entry, best, found)
    tried = {(steps, seed): [] for steps in (200, 800) for seed in (0, 1, 2)}
    for run in runs:
        tried[run.steps, run.seed].append(entry.grid.index(run.setting))
    assert tried[200, 0] == [0, 1, 2, 3, 4] and tuple(tried[800, 0]) == window
    assert all(tried[steps, seed] == [best] for steps in (200, 800) for seed in (1, 2))
    assert sum(run.steps for run in runs) == PROTOCOL.steps(entry) == 5 * 200 + 3 * 800 + 2 * 1000
    assert PROTOCOL.best("p", "o", entry, 800, found) == {"lr": best + 1}


def test_what_has_no_grid_runs_once_a_length_and_seed() -> None:
    entry = Entry("o", lambda model: ())
    runs = finish(entry, 0, {})
    assert len(runs) == 6 and {run.seed for run in runs} == {0, 1, 2}
    assert sum(run.steps for run in runs) == PROTOCOL.steps(entry)


def test_what_diverges_or_breaks_off_is_never_best() -> None:
    entry = Entry("o", lambda model: (), rates(1, 2, 3))
    runs = PROTOCOL.due("p", "o", entry, {})
    records = [record(runs[0], None), record(runs[1], 7.0), record(runs[2], 0.1, error="LinAlgError: no")]
    found = {run.key: each for run, each in zip(runs, records, strict=True)}
    assert PROTOCOL.best("p", "o", entry, 200, found) == {"lr": 2}


def test_where_another_seed_fails_the_next_best_setting_is_taken() -> None:
    entry = Entry("o", lambda model: (), rates(1, 2, 3))
    found: Found = {}
    while due := PROTOCOL.due("p", "o", entry, found):
        for run in due:
            fails = run.setting == {"lr": 3} and run.seed == 1
            found[run.key] = record(run, None if fails else 1 / run.setting["lr"])
    for steps in PROTOCOL.lengths:
        assert PROTOCOL.best("p", "o", entry, steps, found) == {"lr": 2}
        tried = Counter(run["setting"]["lr"] for run in found.values() if run["steps"] == steps)
        assert tried == {1: 1, 2: 3, 3: 3}
    found |= {key: {**each, "final": None, "diverged": True} for key, each in found.items() if each["seed"] == 1}
    found |= {run.key: record(run, None) for run in PROTOCOL.due("p", "o", entry, found)}
    assert not PROTOCOL.due("p", "o", entry, found) and PROTOCOL.best("p", "o", entry, 200, found) == {"lr": 3}


def test_no_more_is_asked_of_what_does_not_run() -> None:
    entry = Entry("o", lambda model: (), rates(1, 2))
    found = {run.key: record(run, None, error="no", curve=[]) for run in PROTOCOL.due("p", "o", entry, {})}
    assert not PROTOCOL.due("p", "o", entry, found)
    (cell,) = scores.cells(["p"], {"o": entry}, PROTOCOL, found)[:1]
    assert cell["losses"] == [None] and cell["error"] == "no"


# ---------------------------------------------------------------------- scores


def test_the_score_is_the_mean_of_the_last_ten() -> None:
    found = summary([float(k) for k in range(100, 0, -1)], 100 * [0.5])
    assert found["initial"] == 100 and found["final"] == pytest.approx(5.5) and not found["diverged"]
    assert found["seconds"] == 50 and 45 <= len(found["curve"]) <= 55
    assert found["curve"][0] == [1, 0.5, 100.0] and found["curve"][-1] == [100, 50.0, 5.5]
    steps = [step for step, _, _ in found["curve"]]
    assert steps == sorted(set(steps))
    assert dict((step, loss) for step, _, loss in found["curve"])[20] == pytest.approx(85.5)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([1.0, 1.9], False), ([1.0, 4.0], True), ([1.0, math.inf], True), ([1.0, math.nan], True), ([], False)],
)
def test_divergence(losses: list[float], diverged: bool) -> None:
    found = summary(losses, len(losses) * [1.0])
    assert found["diverged"] == diverged
    json.dumps(found, allow_nan=False)
    assert (found["final"] is None) == (not losses or not math.isfinite(losses[-1]))


def test_training_ends_where_a_loss_is_not_finite() -> None:
    found = train(PROBLEMS["regression"], ENTRIES["sgdm"], {"lr": 1e6}, 50, 0, QUICK)
    assert found["diverged"] and found["final"] is None and found["valid"] is None and found["curve"][-1][0] < 50


def test_curves_are_compared_at_equal_seconds() -> None:
    curve = [(1, 1.0, 8.0), (2, 2.0, 4.0), (3, 4.0, 1.0)]
    at = {0.5: 8.0, 1.0: 8.0, 1.25: 7.0, 2.0: 4.0, 3.0: 2.5, 4.0: 1.0, 9.0: 1.0}
    assert {seconds: scores.reached(curve, seconds) for seconds in at} == at
    assert scores.reached([(1, 1.0, 8.0), (2, 2.0, None)], 1.0) == 8.0
    assert scores.reached([(1, 1.0, 8.0), (2, 2.0, None)], 1.5) == math.inf


def test_the_budget_is_tuned_adams() -> None:
    entries = {"adam": Entry("Adam", lambda model: (), rates(1, 2)), "slow": Entry("slow", lambda model: ())}
    found: Found = {}
    for name, entry, seconds, final in (("adam", entries["adam"], 2.0, 1.0), ("slow", entries["slow"], 4.0, 0.5)):
        while due := PROTOCOL.due("p", name, entry, found):
            found |= {run.key: record(run, final + run.setting.get("lr", 0), seconds) for run in due}
    made = scores.cells(["p"], entries, PROTOCOL, found)
    slow = next(cell for cell in made if cell["optimizer"] == "slow")
    assert slow["losses"] == 3 * [0.5]
    share = (2.0 - 0.4) / (4.0 - 0.4)
    assert slow["at_seconds"] == pytest.approx(3 * [2.0 - share * 1.5])
    adam = next(cell for cell in made if cell["optimizer"] == "adam")
    assert adam["setting"] == {"lr": 1} and adam["is_end"] and adam["at_seconds"] == adam["losses"] == 3 * [2.0]


@pytest.mark.parametrize("ratio", [1.25, 4.0, 5.0, 30.0])
def test_shorter_runs_have_the_steps_that_adam_has_time_for(ratio: float) -> None:
    """Also where what stands for 800 steps has fewer than 200."""
    entries = {"adam": Entry("Adam", lambda model: ()), "slow": Entry("slow", lambda model: ())}
    found: Found = {}
    for name, each in (("adam", 0.01), ("slow", 0.01 * ratio)):
        while due := PROTOCOL.due("p", name, entries[name], found):
            found |= {run.key: record(run, float(run.steps), each * run.steps) for run in due}
    slow = {
        cell["steps"]: cell["in_seconds"]
        for cell in scores.cells(["p"], entries, PROTOCOL, found)
        if cell["optimizer"] == "slow"
    }
    assert slow == {steps: 3 * [float(round(steps / ratio))] for steps in (200, 800)}


def test_shorter_runs_stand_where_adams_seconds_move_a_little() -> None:
    entry, found = Entry("slow", lambda model: ()), {}
    for name, each in (("adam", 0.01), ("slow", 0.02)):
        while due := PROTOCOL.due("p", name, entry, found):
            found |= {run.key: record(run, float(run.steps), each * run.steps) for run in due}
    for factor, runs in ((1.05, 0), (1.3, 6)):
        moved = {
            key: {**run, "seconds": factor * run["seconds"]} if run["optimizer"] == "adam" else run
            for key, run in found.items()
        }
        assert len(PROTOCOL.due("p", "slow", entry, moved)) == runs


def test_counts_ratios_and_profiles() -> None:
    table = {"a": {"p": 1.0, "q": 4.0, "r": math.inf}, "b": {"p": 2.0, "q": 2.0, "r": 3.0}}
    assert scores.better(table["a"], table["b"]) == (1, 3)
    assert scores.ratios(table["a"], [table["b"]]) == [0.5, 2.0, math.inf]
    assert scores.ratios(table["b"], [table["a"], table["b"]]) == [1.0, 1.0, 2.0]
    assert scores.profile(table, "a") == [1.0, 2.0, math.inf] and scores.profile(table, "b") == [1.0, 1.0, 2.0]
    assert scores.mean([1.0, 2.0]) == 1.5 and scores.mean([1.0, None]) == scores.mean([]) == math.inf
