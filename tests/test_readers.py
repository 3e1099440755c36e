"""The reader's test: what a page shows in twenty lines is enough to start, and trains no worse than Adam."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.untuned.data import Source
from benchmarks.untuned.held_out import HELD_OUT
from benchmarks.untuned.problem import mean_loss, minibatches
from kfqn_ext import OnePassKBFGS, optim

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": (ROOT / "README.md").read_text(), "start.md": (ROOT / "docs/start.md").read_text()}
QUANTITIES, ADAM, BLOCK = "Quantities of your own CNN", "Replace Adam", "One layer's Hessian block"
MOST_LINES, STEPS = 20, 100


def snippet(page: str, title: str) -> str:
    """The first block of Python below a heading."""
    _, _, rest = PAGES[page].partition(f"## {title}\n")
    found = re.search(r"```python\n(.*?)```", rest, re.DOTALL)
    assert found, f"{page} has no code below {title!r}"
    return found[1]


def run(page: str, title: str) -> dict[str, Any]:
    """What the names of a snippet are when it has run, alone."""
    source = snippet(page, title)
    assert len(source.splitlines()) <= MOST_LINES
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(source, names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_quantities_of_a_cnn(page: str) -> None:
    names = run(page, QUANTITIES)
    q, layer = names["q"], names["model"][0]
    assert q.a_bar.shape == (10,) and q.h_bar.shape == q.dh_bar.shape == (4,)
    torch.testing.assert_close(q.num_locations * q.dh_bar, layer.bias.grad)


def test_every_optimizer_has_a_row() -> None:
    _, _, rest = PAGES["README.md"].partition("## Optimizers\n")
    table = " ".join(re.findall(r"^\| (`.*?) \|", rest, re.MULTILINE))
    exported = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    rows = {name for name in exported if issubclass(getattr(optim, name), optim.KroneckerOptimizer)}
    assert set(re.findall(r"`(\w+)`", table)) == rows - {"KroneckerOptimizer"}


@pytest.mark.parametrize("page", PAGES)
def test_adam_is_replaced(page: str) -> None:
    names = run(page, ADAM)
    assert isinstance(names["optimizer"], OnePassKBFGS)
    assert all(p.isfinite().all() for p in names["model"].parameters())


@pytest.mark.parametrize("page", PAGES)
def test_a_block_beside_its_approximations(page: str) -> None:
    names = run(page, BLOCK)
    assert names["B"].shape == (35, 35)
    rows = {row.rung: row for row in names["report"]["0"].rows}
    assert rows["Σ A_tt' ⊗ G_tt'"].error < 1e-10 < rows["nearest Kronecker product"].error <= rows["A ⊗ G"].error


def test_pages_show_the_same() -> None:
    for title in (QUANTITIES, ADAM, BLOCK):
        assert snippet("README.md", title) == snippet("start.md", title)


# ------------------------------------------------------------------ beside Adam, nothing set

OURS, THEIRS = "OnePassKBFGS(model)", "torch.optim.Adam(model.parameters())"


def loop() -> str:
    """The page's own, from the optimizer on."""
    source = snippet("README.md", ADAM)
    return source[source.index("optimizer = ") :]


def loop_of_adam() -> str:
    """At a constant rate, which in so few steps is better for it."""
    lines = [line for line in loop().splitlines() if "schedule" not in line]
    return "\n".join(lines).replace(OURS, THEIRS)


def loss_after(source: str, name: str, seed: int) -> float:
    """Of all training data, after a loop over a hundred minibatches of digits."""
    problem = HELD_OUT[name]
    torch.manual_seed(seed)
    model, data = problem.build(), problem.data(Source(quick=True))
    loader = [(batch.x, batch.y) for batch in islice(minibatches(problem, model, data, seed), STEPS)]
    exec(source, {"torch": torch, "OnePassKBFGS": OnePassKBFGS, "model": model, "loader": loader, "epochs": 1})
    return mean_loss(problem, model, data.train)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", ["gru", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobile", "mixer"))])
def test_as_both_are_built_it_is_no_worse_than_adam(name: str, seed: int) -> None:
    """On networks that played no part in choosing the default."""
    assert OURS in loop() and f"in place of {THEIRS}" in loop() and THEIRS in loop_of_adam()
    assert loss_after(loop(), name, seed) <= loss_after(loop_of_adam(), name, seed)
