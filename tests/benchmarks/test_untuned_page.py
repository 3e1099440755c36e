"""What docs/untuned.md says is what its logs in results/ say."""

import json
import math
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from benchmarks import targets
from benchmarks.untuned.pages import PAGE as ANSWER
from benchmarks.untuned.pages import PARTS, ROOT

PAGES = {page: (ROOT / page).read_text() for page in {part.page for part in PARTS.values()}}
LOGS = {part: ROOT / "results" / f"untuned-{part}.jsonl" for part in ("choice", "held-out")}


def block(name: str) -> str:
    """What stands between the marks of a part."""
    _, begin, rest = PAGES[PARTS[name].page].partition(f"<!-- untuned {name} -->")
    text, end, _ = rest.partition(f"<!-- end of untuned {name} -->")
    assert begin and end
    return text.strip()


@pytest.mark.parametrize("name", PARTS)
def test_tables_are_those_of_the_logs(name: str) -> None:
    assert block(name) == PARTS[name].render(PARTS[name].lines())


def test_every_block_and_figure_is_one_of_these() -> None:
    marks = [name for text in PAGES.values() for name in re.findall("<!-- untuned (.*) -->", text)]
    assert sorted(marks) == sorted(PARTS)
    figures = {path.stem for path in (ROOT / "docs/untuned").glob("*.png")}
    assert figures == {name for name, part in PARTS.items() if part.draw is not None}


# ------------------------------------------------------------------ the answer above the tables

WORDS = " ".join(PAGES[ANSWER].split())
SETS = [json.loads(LOGS[part].read_text()) for part in ("choice", "held-out")]
TIMED = [json.loads(line) for line in (ROOT / "results/untuned-seconds.jsonl").read_text().splitlines()]
# Both sets on another processor, and on a third one; there also with rarer updates early on.
ELSEWHERE, THIRD, RARER = TIMED[:2], TIMED[2:4], TIMED[4:]


def found(results: dict[str, Any], optimizer: str, steps: int, what: str = "losses") -> dict[str, list[float]]:
    """Losses of all seeds by problem, infinite where a run failed."""
    cells = [c for c in results["cells"] if (c["optimizer"], c["steps"]) == (optimizer, steps) and c[what]]
    return {c["problem"]: [math.inf if value is None else value for value in c[what]] for c in cells}


Holds = Callable[[dict[str, Any], str, list[float]], bool]


def count(
    steps: int, holds: Holds, what: str = "losses", row: str = "onepass", sets: list[dict[str, Any]] = SETS
) -> str:
    """On how many problems of both sets something holds for a row, and of how many."""
    each = [holds(results, p, own) for results in sets for p, own in found(results, row, steps, what).items()]
    return f"{sum(each)} of {len(each)}"


def near(steps: int, row: str) -> str:
    """On how many problems a row's loss is at most 1.3 times that of the better of tuned SOAP and Muon."""

    def holds(results: dict[str, Any], problem: str, own: list[float]) -> bool:
        return fmean(own) <= 1.3 * min(fmean(found(results, name, steps)[problem]) for name in ("soap", "muon"))

    return count(steps, holds, row=row)


@pytest.mark.parametrize("steps", [200, 800])
def test_on_how_many_it_is_lower_than_adam_with_each_seed(steps: int) -> None:
    def lower(results: dict[str, Any], problem: str, own: list[float]) -> bool:
        adam = found(results, "adam", steps)[problem]
        return all(a < b for a, b in zip(own, adam, strict=True))

    assert f"on {count(steps, lower)}. It does so with each of three seeds, after 200 and after 800 steps" in WORDS


def test_on_how_many_it_is_near_the_better_of_soap_and_muon() -> None:
    tuned = "Beside the better of tuned SOAP and Muon its loss is at most 1.3 times theirs on"
    assert f"{tuned} {near(200, 'onepass')} after 200 steps." in WORDS
    assert f"After 800 steps it is so on {near(800, 'onepass')}:" in WORDS
    computed = near(200, "onepass-kfac"), near(800, "onepass-kfac")
    assert f"Its loss is at most 1.3 times theirs on {computed[0]} after 200 steps, and on {computed[1]} after" in WORDS


def test_on_which_one_pass_kfac_ends_lower() -> None:
    """On all that one-pass K-BFGS trains: those on which it is below Adam. On the other, neither trains."""
    trained, lower = 0, 0
    for results in SETS:
        adam, own, kfac = (found(results, row, 200) for row in ("adam", "onepass", "onepass-kfac"))
        better = [problem for problem in own if fmean(own[problem]) < fmean(adam[problem])]
        trained += len(better)
        lower += sum(fmean(kfac[problem]) < fmean(own[problem]) for problem in better)
    assert (trained, lower) == (13, 13)
    words = "On these thirteen `OnePassKFAC(model)` ends lower still after 200 steps."
    assert words in " ".join((ROOT / "README.md").read_text().split())


def test_on_how_many_it_is_better_in_the_same_seconds() -> None:
    def better(steps: int, row: str = "onepass", sets: list[dict[str, Any]] = SETS) -> str:
        def holds(results: dict[str, Any], problem: str, own: list[float]) -> bool:
            return fmean(own) < fmean(found(results, "adam", steps)[problem])

        return count(steps, holds, "in_seconds", row, sets)

    long = f"it is better on {better(800)}. There `OnePassKFAC` is better on {better(800, 'onepass-kfac')}."
    assert f"with a rate that falls to zero in these, {long}" in WORDS
    short = f"it is better on {better(200)}, `OnePassKFAC` on {better(200, 'onepass-kfac')}, and KFAC on"
    assert f"In those of 200 steps {short}" in WORDS
    groups = SETS, ELSEWHERE, THIRD
    processors = [{results["environment"]["processor"] for results in group} for group in groups]
    assert [len(names) for names in processors] == [1, 1, 1] and len(set.union(*processors)) == 3
    both, third = ((better(200, sets=group), better(200, "onepass-kfac", group)) for group in (ELSEWHERE, THIRD))
    assert f"and the two were better on {both[0]} and {both[1]} in those of 200 steps." in WORDS
    assert f"On a Xeon without bfloat16 they were better on {third[0]} and {third[1]}." in WORDS
    guide = " ".join((ROOT / "docs/guide.md").read_text().split())
    assert f"better on {better(200)} small networks. In those of 800 steps it is better on {better(800)}." in guide


def test_how_far_kfac_comes() -> None:
    row = next(line for line in block("summary").splitlines() if line.startswith("| KFAC |"))
    _, near, _, _, nearer, _ = (cell.strip() for cell in row.strip("| ").split("|")[1:])
    assert f"at most 1.3 times theirs on {near} after 200 steps, and on {nearer} after 800. It needs" in WORDS
    better = [
        fmean(cell["in_seconds"]) < fmean(found(results, "adam", 200)[cell["problem"]])
        for results in SETS
        for cell in results["cells"]
        if (cell["optimizer"], cell["steps"]) == ("kfac-untuned", 200) and cell["in_seconds"]
    ]
    assert f"and KFAC on {sum(better)} of {len(better)}." in WORDS


def test_nothing_diverged_at_other_rates() -> None:
    rows = [line for line in block("robust").splitlines() if line.startswith("| K-BFGS, one pass |")]
    (log,) = PARTS["robust"].lines()
    late = len(log["problems"]) * len(log["seeds"])
    expected = [("0", str(4 * late))] * 3 + [("0", str(late))]
    assert len(rows) == 1 and re.findall(r"(\d+) of (\d+)", rows[0]) == expected


def test_what_other_rates_and_dampings_gain() -> None:
    (log,) = PARTS["robust"].lines()
    own, gains = log["own"]["onepass"]["damping"], {}
    for problem in log["problems"]:
        cells = [c for c in log["cells"] if c["problem"] == problem and not c["late"]]
        at = {(c["rate"], c["damping"]): fmean(c["losses"]) for c in cells}
        (rate, damping), best = min(at.items(), key=lambda item: item[1])
        assert rate == 1.0
        gains[problem] = at[1.0, own] / best, damping
    *_, near, worst = sorted(gains, key=lambda problem: gains[problem][0])
    assert "rate is the best of the three on all seven problems of the first set" in WORDS
    assert f"The default ε is within {math.ceil(10 * gains[near][0]) / 10:.1f} times the best one on six." in WORDS
    ratio, damping = gains[worst]
    assert worst == "regression" and f"regression ε = {damping} ends {ratio:.1f} times lower" in WORDS


def ends_gain(part: str, optimizer: str) -> dict[str, tuple[float, float]]:
    """By problem, the loss at an optimizer's own values ÷ the best at the ends of both grids, and the best's rate."""
    (log,) = PARTS[part].lines()
    assert all(loss is not None for cell in log["cells"] for loss in cell["losses"])
    gains = {}
    for problem in log["problems"]:
        cells = [c for c in log["cells"] if (c["optimizer"], c["problem"], c["late"]) == (optimizer, problem, False)]
        at = {(c["rate"], c["damping"]): fmean(c["losses"]) for c in cells}
        best = min(at, key=at.__getitem__)
        gains[problem] = at[1.0, log["own"][optimizer]["damping"]] / at[best], best[0]
    return gains


def test_nothing_diverged_in_two_passes_and_what_the_ends_gain() -> None:
    for optimizer in ("kbfgs", "kfac-untuned"):
        most = max(ratio for ratio, _ in ends_gain("robust-two-pass", optimizer).values())
        assert f"is within {most:.1f} times the best of these for both" in WORDS
    most = max(ratio for ratio, _ in ends_gain("robust-one-pass-kfac", "onepass-kfac").values())
    assert f"`OnePassKFAC` does not diverge there either, and its loss is within {most:.1f} times the best." in WORDS


def test_nothing_diverged_on_held_out_problems_and_what_the_ends_gain() -> None:
    gains = ends_gain("robust-held-out", "onepass")
    *near, tabular, mixer = sorted(gains, key=lambda problem: gains[problem][0])
    assert (mixer, tabular) == ("mixer", "tabular") and gains[mixer][1] == gains[tabular][1] < 0.4
    assert f"is within {gains[near[-1]][0]:.1f} times the best of these on five" in WORDS
    assert f"On `mixer` and `tabular` it is {gains[mixer][0]:.1f} and {gains[tabular][0]:.1f} times the best" in WORDS
    computed = ends_gain("robust-held-out", "onepass-kfac")
    *near, worst = sorted(computed, key=lambda problem: computed[problem][0])
    assert worst == "tabular" and computed[worst][1] < 0.4
    within = (
        f"within {computed[near[-1]][0]:.1f} times the best on six, and {computed[worst][0]:.1f} times on `tabular`"
    )
    assert f"That of `OnePassKFAC` is {within}" in WORDS


def test_how_the_best_rate_depends_on_the_width() -> None:
    (log,) = PARTS["widths"].lines()
    best: dict[tuple[str, str], list[float]] = {}
    for cell in log["cells"]:
        cell["loss"] = math.inf if None in cell["losses"] else fmean(cell["losses"])
    for optimizer in ("onepass", "adam"):
        for network in log["networks"]:
            for width in log["widths"]:
                labels = (optimizer, network, width)
                mine = [c for c in log["cells"] if (c["optimizer"], c["network"], c["width"]) == labels]
                best.setdefault(labels[:2], []).append(min(mine, key=lambda c: c["loss"])["setting"]["lr"])
    (own,) = {c["setting"]["lr"] for c in log["cells"] if c["optimizer"] == "onepass" and c["is_own"]}
    at_own = [c["loss"] for c in log["cells"] if c["optimizer"] == "onepass" and c["network"] == "mlp" and c["is_own"]]
    assert set(best["onepass", "cnn"]) == {own} and "On the CNN it is the default at every width" in WORDS
    assert {rate / own for rate in best["onepass", "mlp"]} == {2, 4} and "it is two to four times the default" in WORDS
    assert 1e-4 < max(at_own) < 2e-4 and "losses are below 0.0002 at the default already" in WORDS
    falls = [round(max(best["adam", network]) / min(best["adam", network])) for network in ("mlp", "cnn")]
    assert falls == [3, 10] and "a factor of three on the MLP, and of ten on the CNN" in WORDS


def test_what_rarer_early_updates_gain_and_lose() -> None:
    words = " ".join(PAGES["docs/design.md"].split())
    processors = {results["environment"]["processor"] for results in [*THIRD, *RARER]}
    assert len(processors) == 1 and all(results["rows"].startswith("T spaced k / 3") for results in RARER)

    def changed(row: str, what: str, number: int) -> str:
        """The loss with rarer updates ÷ that with today's, on one set: geometric mean."""
        rarer, today = (found(sets[number], row, 200, what) for sets in (RARER, THIRD))
        return f"{math.exp(fmean(math.log(fmean(rarer[p]) / fmean(today[p])) for p in today)):.2f}"

    cells = ("losses", 0), ("in_seconds", 0), ("in_seconds", 1)
    steps, own, held = (changed("onepass", *cell) for cell in cells)
    assert f"With 18 of them the loss is {steps} times as high after 200 steps." in words
    assert f"it is {own} times as high, and {held} times on the held-out problems." in words
    steps, own, held = (changed("onepass-kfac", *cell) for cell in cells)
    assert f"With `OnePassKFAC` it is {steps} times, and then {own} and {held} times." in words
    assert [row.split(" of")[0] for row in means("early", "lenet")] == ["32", "27", "22", "18", "14"]
    assert "and are 32 of the first 100" in words


def test_what_holds_up_small_losses() -> None:
    (log,) = [line for line in PARTS["tried long"].lines() if line["study"] == "long"]
    loss = {(c["optimizer"], c["problem"]): fmean(c["losses"]) for c in log["cells"]}
    gains = loss["one pass", "regression"] / loss["ε = 0.03", "regression"]
    halved = loss["one pass", "lenet"] / loss["rate × 1/2", "lenet"]
    words = " ".join(PAGES["docs/design.md"].split())
    assert f"ε = 0.03 ends {gains:.1f} times lower on the regression" in words
    assert f"Half the rate ends {halved:.1f} times lower on `lenet`" in words
    soap = found(SETS[0], "soap", 800)
    assert loss["ε = 0.03", "regression"] < min(soap["regression"])


def means(study: str, problem: str) -> dict[str, float]:
    (log,) = [line for line in PARTS[f"tried {study}"].lines() if line["study"] == study]
    return {c["optimizer"]: fmean(c["losses"]) for c in log["cells"] if c["problem"] == problem}


def test_what_averages_and_computed_inverses_gain_on_the_autoencoder() -> None:
    words = " ".join(PAGES["docs/design.md"].split())
    loss = means("averaged-wide", "ae-28")
    neither, average, both = (loss[row] for row in ("β = 0, none", "β = 0.75, none", "β = 0.75, 3 random"))
    assert f"the loss is {neither:.3g} with neither, {average:.3g} with the average, and {both:.3g} with both" in words
    loss = means("computed-wide", "ae-28")
    rows = ("both computed", "both computed, p = 1/2", "KFAC, α = 0.4, ε = 0.1")
    inverses, root, kfac = (f"{loss[row] / loss['both learned']:.3f}" for row in rows)
    assert f"On `ae-28` they end at {inverses}, with the root at {root}, and KFAC at {kfac}." in words


def test_where_the_average_of_a_computed_inverse_starts() -> None:
    words = " ".join(PAGES["docs/design.md"].split())
    first, identity = "both computed, Γ̂ from Γ̂", "both computed"
    early, late = means("computed-early", "ae-28"), means("computed-wide", "ae-28")
    assert f"the loss is {early[first]:.3g} with it and {early[identity]:.3g} with I after 60 steps" in words
    assert f"and {late[first]:.3g} and {late[identity]:.3g} after 120." in words
    (log,) = [line for line in PARTS["tried computed"].lines() if line["study"] == "computed"]
    ratios = {p: means("computed", p)[first] / means("computed", p)[identity] for p in log["problems"]}
    assert {p for p, ratio in ratios.items() if ratio < 1} == {"gpt", "deepmlp"}
    assert 3 < 1 / ratios["deepmlp"] < 4 and "On five of the seven problems I ends lower too." in words


def test_what_a_rate_by_the_weight_s_own_size_does() -> None:
    words = " ".join(PAGES["docs/design.md"].split())
    sines = means("small-weights", "coordinates")
    shares = {float(row.split()[0]): loss for row, loss in sines.items() if row != "both learned"}
    trained = {share for share, loss in shares.items() if loss < 0.1}
    assert trained == {0.2} and "The network trains where steps are at most 0.2 times as long as the weight" in words
    (log,) = [line for line in PARTS["tried small-weights"].lines() if line["study"] == "small-weights"]
    higher = [
        problem
        for problem in log["problems"]
        if means("small-weights", problem)["0.2 times its size"] > means("small-weights", problem)["both learned"]
    ]
    assert sorted({*log["problems"]} - {*higher}) == ["coordinates", "resnet"]
    assert "and six of the other seven then end higher" in words


def test_what_computed_inverses_gain_on_the_seven_problems() -> None:
    words = " ".join(PAGES["docs/design.md"].split())

    def compared(part: str, row: str) -> tuple[str, str]:
        (line,) = (line for line in block(f"tried {part}").splitlines() if line.startswith(f"| {row} |"))
        *_, ratio, lower = line.strip("| ").split(" | ")
        return ratio, lower

    (ratio, lower), (long_ratio, long_lower) = (compared(p, "both computed") for p in ("computed", "computed-long"))
    assert (lower, long_lower) == ("7 of 7", "5 of 6")
    rounded = (
        f"at {float(ratio):.1f} times the loss of `OnePassKBFGS` after 200 steps, and at {float(long_ratio):.1f} times"
    )
    assert rounded in WORDS
    assert f"both computed end at {ratio} times the default's loss, and lower on all seven." in words
    assert f"After 800 steps it is {long_ratio} times, and lower on five of six." in words
    assert float(compared("computed", "both computed, p = 1/2")[0]) > float(ratio)


def test_what_a_step_takes() -> None:
    problems = json.loads((ROOT / "results/benchmarks.jsonl").read_text())["problems"]
    own, kfac, adamw = "one-pass K-BFGS without tuning, T = 20", "one-pass KFAC without tuning, T = 20", "AdamW"

    def of(name: str, *titles: str) -> list[str]:
        return [f"{targets.row(problems[name], title)['time']:.2f}" for title in titles]

    words = "its step takes {} times SGD-m's, that of `OnePassKFAC` {} times, and AdamW's {} times"
    assert f"On a ResNet32 {words.format(*of('resnet32', own, kfac, adamw))}." in WORDS
    three = (of(name, own, kfac, adamw) for name in ("autoencoder", "vgg16"))
    assert (
        "On the MNIST autoencoder these are {}, {} and {}, and on a VGG16 {}, {} and {}.".format(*sum(three, []))
        in WORDS
    )
    rounded = (of(name, f"{own}, bfloat16")[0] for name in ("resnet32", "autoencoder", "vgg16"))
    assert "its own are {}, {} and {} ".format(*rounded) in WORDS
    here, there = in_adams(SETS), in_adams(ELSEWHERE)
    assert f"its step takes {min(here):.1f} to {max(here):.1f} times Adam's seconds" in WORDS
    assert f"a step there took {min(there):.1f} to {max(there):.1f} times Adam's seconds" in WORDS


def in_adams(sets: list[dict[str, Any]]) -> list[float]:
    """Seconds of the one-pass row in Adam's: geometric means over the problems of a set and a length."""
    return [
        math.exp(fmean(math.log(cell["seconds"] / adam[cell["problem"]]) for cell in cells))
        for results in sets
        for steps in (200, 800)
        for adam in [
            {c["problem"]: c["seconds"] for c in results["cells"] if (c["optimizer"], c["steps"]) == ("adam", steps)}
        ]
        for cells in [[c for c in results["cells"] if (c["optimizer"], c["steps"]) == ("onepass", steps)]]
    ]


def test_how_far_the_autoencoder_comes() -> None:
    curves = {
        (log["epochs"], cell["optimizer"]): {epoch: loss for epoch, _, loss in cell["curve"]}
        for log in PARTS["autoencoder"].lines()
        for cell in log["cells"]
    }

    def reached(loss: float, epochs: int, name: str) -> int:
        return min(epoch for epoch, value in curves[epochs, name].items() if value <= loss)

    def end(epochs: int, name: str) -> str:
        return f"{curves[epochs, name][epochs]:.1f}"

    own, paper = "onepass", "kbfgs-paper"
    kfac = "kfac-untuned"
    first = "onepass-kfac"
    passes = f"passes 60 in epoch {reached(60, 16, first)}, 56 in epoch {reached(56, 16, first)}"
    assert f"{passes}, and 54 in epoch {reached(54, 16, first)}. `KFAC(model)` does so too." in WORDS
    assert [reached(loss, 16, kfac) for loss in (60, 56, 54)] == [reached(loss, 16, first) for loss in (60, 56, 54)]
    for name in (own, paper):
        assert f"in epochs {reached(60, 16, name)} and {reached(56, 16, name)}" in WORDS
    ours = f"{end(16, first)} of `OnePassKFAC`, {end(16, kfac)} of `KFAC`"
    assert f"The ends are {ours}, {end(16, paper)} of the paper's, and {end(16, own)} of `OnePassKBFGS`." in WORDS
    assert f"`KFAC` passes 54 in epoch {reached(54, 40, kfac)}, and ends at {end(40, kfac)}." in WORDS
    long = f"passes the paper's 51.3 in epoch {reached(51.3, 100, first)}, and ends at {end(100, first)}"
    assert f"With a hundred epochs `OnePassKFAC` {long}" in WORDS


def test_what_fails_among_todays_rates() -> None:
    log = json.loads((ROOT / "results" / "untuned-heatmaps.jsonl").read_text())
    cells = [cell for cell in log["cells"] if cell["optimizer"] == "onepass"]
    failed = [cell["setting"]["lr"] / log["own"]["lr"] for cell in cells if cell["loss"] is None]
    assert (len(cells), failed) == (80, [10.0])
    assert "one of eighty runs fails, at ten times the rate. Neither `lenet` nor `deepmlp` trains there" in WORDS
    there = [c["loss"] for c in cells if c["setting"]["lr"] == 4.0 and c["problem"] in ("lenet", "deepmlp")]
    assert len(there) == 8 and min(there) > 1.5


def test_where_ours_fail_and_where_soap_is_ahead() -> None:
    found = {
        (cell["problem"], cell["optimizer"]): fmean(cell["losses"])
        for results in SETS
        for cell in results["cells"]
        if cell["steps"] == 800 and None not in cell["losses"] and not cell["error"]
    }
    ours = ("onepass", "onepass-kfac", "kbfgs", "kbfgsl", "kfac-untuned")
    assert all(found["coordinates", name] > 100 * found["coordinates", "adam"] for name in ours)
    assert "**All of ours fail on one**, a network of sines" in WORDS
    problems = [problem for problem, name in found if name == "onepass"]
    ahead = sum(found[problem, "soap"] < found[problem, "onepass"] for problem in problems)
    assert f"SOAP ends lower than it on {ahead}." in WORDS
