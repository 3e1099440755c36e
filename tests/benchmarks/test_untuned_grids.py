"""The studies beside the benchmark without tuning that run a grid: changed defaults, and wider networks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from benchmarks.untuned import grids, robust, widths
from benchmarks.untuned.lists import ENTRIES
from benchmarks.untuned.peers import PEERS
from benchmarks.untuned.wide import WIDE, WIDTHS
from kfqn_ext.optim.groups.hyperparameters import update_freq

pytestmark = [pytest.mark.filterwarnings("ignore")]  # a rate that is too large is worth a warning
OWN = {"lr": 0.3, "damping": 0.3, "curvature_update_freq": 1}
SHARED = {"optimizers": {"o": "O"}, "steps": 2, "seeds": [0], "command": "c"}
COST = {"cost": {"runs": 1, "seconds": 60.0, "wall": 60.0}}


def run(main: Callable[[list[str]], None], directory: Path, *more: str) -> dict:
    """The results of a quick run."""
    files = ["--log", str(directory / "log.jsonl"), "--json", str(directory / "numbers.json")]
    main(["--quick", "--jobs", "1", *files, *more])
    return json.loads((directory / "numbers.json").read_text())


def lines(directory: Path) -> list[str]:
    return (directory / "log.jsonl").read_text().splitlines()


def numbers(text: str, title: str) -> list[str]:
    """What a table has in the last row with a title."""
    row = [line for line in text.splitlines() if line.startswith(f"| {title} |")][-1]
    return [cell.strip() for cell in row.split("|")[2:-1]]


# ---------------------------------------------------------------------- changed defaults


def test_all_rates_meet_all_dampings() -> None:
    *grid, late = robust.variants(OWN)
    settings = {(v["setting"]["lr"], v["setting"]["damping"]) for v in grid}
    assert settings == {(lr, damping) for lr in (0.1, 0.3, 0.9) for damping in (0.03, 0.1, 0.3, 1.0)}
    assert len(grid) == 12 and not any(v["late"] for v in grid)
    assert late["late"] and late["setting"] == {"lr": 0.3, "damping": 0.3, "curvature_update_freq": 20}


def test_an_own_damping_that_is_none_of_the_four_is_a_fifth() -> None:
    *grid, late = robust.variants({"lr": 0.3, "damping": 30.0, "stats_update_freq": 1})
    assert len(grid) == 15 and late["setting"] == {"lr": 0.3, "damping": 30.0, "stats_update_freq": 20}


def test_ends_alone_are_four_beside_the_own_values() -> None:
    *grid, late = robust.variants(OWN, ends=True)
    settings = sorted((v["setting"]["lr"], v["setting"]["damping"]) for v in grid)
    assert settings == [(0.1, 0.03), (0.1, 1.0), (0.3, 0.3), (0.9, 0.03), (0.9, 1.0)] and late["late"]


@pytest.mark.parametrize("name", grids.UNTUNED)
def test_what_is_changed_arrives(name: str) -> None:
    own = ENTRIES[name].defaults()
    first, *_, late = robust.variants(own)
    (optimizer,) = ENTRIES[name].build(nn.Linear(2, 3), **first["setting"])
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(own["lr"] / 3, rel=1e-2) and group["damping"] == 0.03 != own["damping"]
    (optimizer,) = ENTRIES[name].build(nn.Linear(2, 3), **late["setting"])
    group = optimizer.param_groups[0]
    assert update_freq(group) == 20 and group["lr"] == own["lr"] and group["damping"] == own["damping"]


def test_changed_defaults_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    chosen = ["--problems", "tabular", "--optimizers", "onepass", "kfac-untuned", "--seeds", "0", "1"]
    results = run(robust.main, tmp_path, *chosen)
    assert robust.render(results) in capsys.readouterr().out
    variants = sum(len(robust.variants(ENTRIES[name].defaults())) for name in ("onepass", "kfac-untuned"))
    assert len(results["cells"]) == variants and len(lines(tmp_path)) == 2 * variants
    assert all(len(cell["losses"]) == 2 and cell["error"] is None for cell in results["cells"])
    before = lines(tmp_path)
    again = run(robust.main, tmp_path, *chosen)
    assert lines(tmp_path) == before and again["cells"] == results["cells"]
    (tmp_path / "log.jsonl").write_text("\n".join(before[:-3]))
    run(robust.main, tmp_path, *chosen)
    assert len(lines(tmp_path)) == len(before)


def test_own_values_are_compared_with_the_best_at_their_rate_and_at_any() -> None:
    losses = {(1.0, 0.3, True): 0.25, (1.0, 0.3, False): 2.0, (1.0, 0.1, False): 1.0, (3.0, 0.3, False): 0.5}
    labels = [dict(zip(("rate", "damping", "late"), key, strict=True)) for key in losses]
    cells = [
        {"problem": "p", "optimizer": "o", "losses": [loss], "error": None, **label}
        for label, loss in zip(labels, losses.values(), strict=True)
    ]
    cells.append({**cells[-1], "damping": 1.0, "losses": [0.1, None], "error": "no"})
    results = {**SHARED, **COST, "problems": {"p": "P"}, "cells": cells, "own": {"o": {"lr": 0.3, "damping": 0.3}}}
    text = robust.render(results)
    assert numbers(text, "own ÷ best ε at this rate") == ["2"] and numbers(text, "own ÷ best") == ["4"]
    assert numbers(text, "rate × 3, ε 1") == ["∞"] and "O on p: no." in text
    assert numbers(text, "O") == ["0 of 0", "0 of 2", "1 of 3", "0 of 1"]


def test_own_values_are_compared_with_nothing_where_they_are_alone() -> None:
    cell = {
        "problem": "p",
        "optimizer": "o",
        "losses": [2.0],
        "error": None,
        "rate": 1.0,
        "damping": 0.3,
        "late": False,
    }
    results = {**SHARED, **COST, "problems": {"p": "P"}, "own": {"o": {"lr": 0.3, "damping": 0.3}}}
    text = robust.render({**results, "cells": [cell, {**cell, "rate": 3.0, "losses": [1.0]}]})
    assert "own ÷ best ε at this rate" not in text and numbers(text, "own ÷ best") == ["2"]


# ---------------------------------------------------------------------- wider networks


def test_networks_of_all_widths_have_the_same_layers() -> None:
    for network in ("mlp", "cnn"):
        shapes = [[tuple(p.shape) for p in WIDE[f"{network}-{width}"].build().parameters()] for width in WIDTHS]
        assert len({len(each) for each in shapes}) == 1
        for width, each in zip(WIDTHS, shapes, strict=True):
            assert all(a[0] in (b[0], width * b[0]) for a, b in zip(each, shapes[0], strict=True))
            assert each[0][0] == width * shapes[0][0][0] and each[-1] == (10,)


def test_rates_lie_around_the_own_one_and_adam_has_its_grid() -> None:
    own = ENTRIES["kbfgs"].defaults()["lr"]
    found = widths.rates(ENTRIES["kbfgs"])
    assert [rate["setting"]["lr"] / own for rate in found] == pytest.approx([0.25, 0.5, 1, 2, 4])
    assert [rate["is_own"] for rate in found] == [False, False, True, False, False]
    found = widths.rates(ENTRIES["adam"])
    assert [rate["setting"] for rate in found] == list(PEERS["adam"].grid)
    assert [rate["setting"]["lr"] for rate in found if rate["is_own"]] == [1e-3]


def test_wider_networks_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results = run(widths.main, tmp_path, "--optimizers", "onepass", "adam")
    assert widths.render(results) in capsys.readouterr().out
    assert len(results["cells"]) == len(lines(tmp_path)) == 2 * 2 * 2 * 5  # networks, widths, optimizers, rates
    assert {cell["problem"] for cell in results["cells"]} == {"mlp-1", "mlp-2", "cnn-1", "cnn-2"}
    assert all(cell["error"] is None for cell in results["cells"])
    assert all(cell["losses"] != [None] for cell in grids.of(results["cells"], optimizer="onepass", is_own=True))


def test_rates_are_compared_with_the_best_at_their_width() -> None:
    losses = {1: (4.0, 2.0, 1.0), 2: (6.0, 2.0, 3.0), 4: (None, 5.0, None), 8: (None, None, None)}
    cells = [
        {"network": "mlp", "problem": "mlp", "optimizer": "o", "width": width, "losses": [loss], "error": None}
        | {"setting": {"lr": rate}, "is_own": rate == 0.1}
        for width, row in losses.items()
        for rate, loss in zip((0.1, 0.2, 0.4), row, strict=True)
    ]
    text = widths.render({**SHARED, **COST, "networks": ["mlp"], "widths": [1, 2, 4, 8, 16], "cells": cells})
    tables = text.split("\n\n")
    best, own, narrow = (numbers(tables[place], "O") for place in (3, 5, 7))
    assert best == ["0.4 ◂", "0.2", "0.2", "", ""]
    assert own == ["4", "3", "∞", "∞", ""] and narrow == ["1", "1.5", "∞", "∞", ""]
    assert numbers(text, "O, 0.1") == ["4", "6", "∞", "∞", ""]
