"""The studies of single ideas beside the defaults, and the rules that were only tried."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.untuned import tried, variants
from benchmarks.untuned.entry import Optimizers
from benchmarks.untuned.grouped import GROUPED
from benchmarks.untuned.tried import STUDIES
from benchmarks.untuned.variants import Reduction, Shaped
from kfqn_ext.optim import KBFGS, Minibatch, OnePassKFAC
from kfqn_ext.optim.gate import Gate
from kfqn_ext.optim.inverses import FisherInverse
from kfqn_ext.optim.lengths import Spectral, Step


@pytest.mark.parametrize("name", STUDIES)
def test_runs_of_a_study_can_go_to_another_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command hands to its processes arrives there."""

    class SentError(Exception):
        pass

    def run(args: Any, work: Any, one: Any) -> None:
        pickle.loads(pickle.dumps(one))
        raise SentError

    monkeypatch.setattr(tried.study, "run", run)
    with pytest.raises(SentError):
        tried.main([name])


def test_the_root_of_a_moving_average() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    recipe = replace(OnePassKFAC.recipe, output_inverse=variants.FisherRoot())
    optimizer = OnePassKFAC(model, recipe=recipe, stats_update_freq=1, inverse_update_freq=1)
    for _ in range(3):
        F.cross_entropy(model(torch.randn(16, 4, dtype=torch.float64)), torch.randint(3, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.weight]
    product = state["H_G"] @ state["H_G"] @ (state["Gamma"] + 0.1 * torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(product, torch.eye(3, dtype=torch.float64))


def test_a_moving_average_that_starts_from_the_first_minibatch() -> None:
    """That one is then all of it, and else it is a tenth of it beside I."""
    x, t = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))

    def Gamma_of(rule: FisherInverse) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        optimizer = OnePassKFAC(model, recipe=replace(OnePassKFAC.recipe, output_inverse=rule))
        F.cross_entropy(model(x), t).backward()
        optimizer.step()
        Gamma: Tensor = optimizer.state[model.weight]["Gamma"]
        return Gamma

    first = Gamma_of(variants.FisherFromFirst())
    torch.testing.assert_close(first.trace().item(), 3.0)
    torch.testing.assert_close(Gamma_of(FisherInverse()), 0.9 * torch.eye(3, dtype=torch.float64) + 0.1 * first)


def steps_of(*shapes: tuple[int, ...]) -> list[Step]:
    torch.manual_seed(0)
    Ps = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [Step(P, P, [P.norm()], 0.8, {}) for P in Ps]


def lengths(rule: Spectral, *shapes: tuple[int, ...]) -> list[float]:
    """‖cP‖₂ of each, or of each block of the only one, once the power iteration has converged."""
    given, gate = steps_of(*shapes), Gate(torch.tensor(True))
    for _ in range(200):
        steps = [replace(step, direction=step.direction.clone()) for step in given]  # a rule may change them in place
        scales = rule.scales(steps, gate)
    found = [torch.linalg.matrix_norm(c * s.direction, 2) for c, s in zip(scales, steps, strict=True)]
    return torch.stack(found).flatten().tolist()


def test_shapes_count_by_their_power() -> None:
    shapes = [(8, 2), (3, 3), (2, 8)]
    assert lengths(Shaped(), *shapes) == pytest.approx(lengths(Spectral(), *shapes))
    assert lengths(Shaped(0.0), *shapes) == pytest.approx([1, 1, 1])
    assert lengths(Shaped(1.0), *shapes) == pytest.approx([4, 1, 1])
    assert lengths(Shaped(0.5, 0.0), *shapes) == pytest.approx([2, 1, 0.5])


def test_each_group_gets_the_length_of_the_longest() -> None:
    alone = lengths(Spectral(), (3, 4, 4))
    assert max(alone) == pytest.approx(1) and min(alone) < 0.9
    assert lengths(variants.EachGroup(), (3, 4, 4)) == pytest.approx([1, 1, 1], rel=1e-3)
    assert lengths(variants.EachGroup(), (4, 4)) == pytest.approx([1])


def test_rates_of_a_warm_up() -> None:
    rate = variants.warm_up(0.1).schedule(100)
    assert [rate(0), rate(4), rate(50), rate(100)] == pytest.approx([0.1, 0.5, 0.5, 0], abs=3e-3)


def quadratic(factor: float) -> tuple[nn.Linear, Minibatch]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, Minibatch(model, lambda y, t: factor * F.mse_loss(y, t), torch.randn(32, 4), torch.randn(32, 3))


@pytest.mark.parametrize(("rate", "factor"), [(1e-4, 1 / 1.5), (4.0, 1.5)])
def test_a_number_follows_what_the_step_has_gained(rate: float, factor: float) -> None:
    model, batch = quadratic(1.0)
    optimizer, rule = KBFGS(model, lr=rate), Reduction("damping", 1.5, 0.1, 10.0)
    own, before = optimizer.param_groups[0]["damping"], batch.loss().item()
    assert rule((optimizer,), batch).item() == pytest.approx(before)
    assert rule.factor == pytest.approx(factor) and optimizer.param_groups[0]["damping"] == own
    for _ in range(9):
        rule.least, rule.most = 0.9, 1.1
        rule((optimizer,), batch)
    assert 0.9 <= rule.factor <= 1.1


def test_before_a_normalization_alone_fisher_products_teach() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    optimizers: Optimizers = variants.fisher_where_blind().entry.build(model)
    batch = Minibatch(model, F.cross_entropy, torch.randn(16, 1, 6, 6), torch.arange(16) % 3)
    for _ in range(12):
        variants.fisher_where_blind().entry.step(optimizers, batch)
    states = [optimizers[0].state[layer.weight] for layer in (model[0], model[4])]
    seen = [state.get("of_fisher") for state in states]
    assert seen[0] is not None and seen[0][0] > 0 and states[0]["pairs_seen_G"][0] == 0
    assert seen[1] is None and states[1]["pairs_seen_G"][0] > 0
    H = states[0]["H_G"]
    assert torch.linalg.eigvalsh(H).min() > 0 and (H - H.diagonal().mean() * torch.eye(4)).abs().max() > 1e-3


@pytest.mark.parametrize("name", GROUPED)
def test_networks_have_groups(name: str) -> None:
    groups = [m.groups for m in GROUPED[name].build().modules() if isinstance(m, nn.Conv2d)]
    assert max(groups) > 1


def test_a_row_s_name_stands_for_one_thing() -> None:
    """The log goes by it."""
    meanings: dict[str, list[Any]] = {}
    for study in STUDIES.values():
        for row, variant in study.rows.items():
            meanings.setdefault(row, []).append((variant.entry.title, variant.entry.step, variant.setting))
    assert all(meaning == same[0] for same in meanings.values() for meaning in same)


def test_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = ["--log", str(tmp_path / "log"), "--json", str(tmp_path / "json")]
    for name in ("groups", "warm-up"):
        tried.main([name, "--quick", "--jobs", "1", "--seeds", "0", "1", *files])
    lines = [json.loads(line) for line in (tmp_path / "json").read_text().splitlines()]
    assert [line["study"] for line in lines] == ["groups", "warm-up"]
    assert tried.render(lines[1]) in capsys.readouterr().out
    for line in lines:
        assert len(line["cells"]) == len(line["problems"]) * len(line["optimizers"])
        assert all(len(cell["losses"]) == 2 and cell["error"] is None for cell in line["cells"])


def test_rows_are_compared_with_the_first() -> None:
    losses = {"a": {"p": [2.0, 4.0], "q": [1.0]}, "b": {"p": [6.0], "q": [0.5]}, "c": {"p": [None], "q": [2.0]}}
    cells = [
        {"problem": p, "optimizer": row, "losses": values, "valid": [], "error": None}
        for row, by_problem in losses.items()
        for p, values in by_problem.items()
    ]
    shared = {
        "steps": 2,
        "seeds": [0],
        "command": "c",
        "valid": False,
        "cost": {"runs": 1, "seconds": 0.0, "wall": 0.0},
    }
    problems = {"p": "P", "q": "Q"}
    text = tried.render({**shared, "problems": problems, "optimizers": {row: row for row in losses}, "cells": cells})
    assert "| a | 3 | 1 |  |  |" in text and "| b | 6 | 0.5 | 1 | 1 of 2 |" in text
    assert "| c | ∞ | 2 | ∞ | 0 of 2 |" in text
    zero = [
        {**cell, "losses": [0.0]} if cell["problem"] == "p" and cell["optimizer"] == "a" else cell for cell in cells
    ]
    text = tried.render({**shared, "problems": problems, "optimizers": {row: row for row in losses}, "cells": zero})
    assert "| b | 6 | 0.5 | 0.5 | 1 of 1 |" in text  # nothing is a multiple of zero
