"""The numbers of docs/comparison.md are those of the logs in results/."""

import json
from pathlib import Path
from statistics import fmean

from benchmarks.targets import row

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()
PROBLEMS = json.loads((ROOT / "results/benchmarks.jsonl").read_text())["problems"]


def test_the_table_of_steps() -> None:
    block = PAGE.partition("<!-- comparison -->")[2].partition("<!-- end of comparison -->")[0]
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 8
    for name, *cells in rows:
        times = [row(PROBLEMS[problem], name)["time"] for problem in ("resnet32", "autoencoder", "vgg16")]
        assert cells == [f"{time:.2f}" for time in times]


def test_how_often_others_end_lower() -> None:
    logs = [json.loads((ROOT / f"results/untuned-{name}.jsonl").read_text()) for name in ("choice", "held-out")]
    cells = [cell for log in logs for cell in log["cells"]]
    found = {(c["optimizer"], c["steps"], c["problem"]): fmean(c["losses"]) for c in cells if None not in c["losses"]}

    def lower(name: str, steps: int) -> str:
        ours = {problem: loss for (who, k, problem), loss in found.items() if (who, k) == ("onepass", steps)}
        return f"{sum(found[name, steps, problem] < loss for problem, loss in ours.items())} of {len(ours)}"

    words = " ".join(PAGE.split())
    assert f"SOAP ends lower than it on {lower('soap', 200)}, tuned Muon on {lower('muon', 200)}." in words
    assert f"SOAP does on {lower('soap', 800)}, and Muon on {lower('muon', 800)}." in words
    adam = {(c["steps"], c["problem"]): fmean(c["losses"]) for c in cells if c["optimizer"] == "adam"}
    shorter = [c for c in cells if (c["optimizer"], c["steps"]) == ("onepass", 200)]
    ahead = sum(None not in c["in_seconds"] and fmean(c["in_seconds"]) < adam[200, c["problem"]] for c in shorter)
    assert f"In the seconds of 200 steps of Adam it is better on {ahead} of {len(shorter)}." in words


def test_what_extraction_costs() -> None:
    costs = PROBLEMS["resnet32"]["extraction"]
    ours, factors, others = (costs[n] for n in ("KBFGSQuantities(probe=…)", "KFACFactors()", "curvlinops' KFAC"))
    words = (
        f"on ResNet32 {ours:.2f} for `KBFGSQuantities` with a probe, {factors:.2f} for `KFACFactors`, and {others:.2f}"
    )
    assert words in " ".join(PAGE.split())
    assert isinstance(costs["BackPACK's KFAC"], str)  # what it says instead of a number
