"""The loops of examples/loops/ train as they are shipped; those of trainers are in tests/real/trainers.py too."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.real.trainers import FOLDER, example, learned, their_warnings

PAGE = (FOLDER.parents[1] / "docs/loops.md").read_text()


@pytest.mark.parametrize("name", ["closure", "drop_in", "mixed_precision", "accumulation"])
def test_a_loop_learns(name: str) -> None:
    learned(example(name).main())


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been() -> None:
    stopped, whole = example("resume").main()
    assert stopped == whole and len(whole) == 40
    learned(whole)


def test_lightning_does_it_all() -> None:
    with their_warnings():
        pytest.importorskip("lightning")
        learned(example("lightning_automatic").main())


def test_hugging_face_with_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step but the last, whose second pass nothing asks for, gives H_G a pair."""
    with their_warnings():
        pytest.importorskip("transformers")
        module, made = example("hugging_face"), []
        monkeypatch.setattr(
            module, "KBFGS", lambda model: made.append(KBFGS(model, curvature_update_freq=1)) or made[0]
        )
        from kfqn_ext.optim import KBFGS

        learned(module.main())
    numbers = made[0].diagnostics().as_dict()
    assert sum(numbers[f"net.0/H_G/{kind}"] for kind in ("kept", "skipped")) == 32 - 1
    assert numbers["net.0/H_G/kept"] > 25


# ------------------------------------------------------------------ loggers


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of which only a few names are needed, as it is not installed for tests."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_what_was_learned_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []
    runs: list[tuple[dict[str, float], int]] = []
    writer = SimpleNamespace(add_scalar=lambda *values: scalars.append(values), flush=lambda: None)
    run = SimpleNamespace(log=lambda numbers, step: runs.append((numbers, step)))
    stub(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda folder: writer)
    stub(monkeypatch, "wandb", init=lambda project: run)
    module = example("logging_curvature")
    learned(module.main(module.to_tensorboard("folder"), module.to_wandb("project")))
    assert [step for _, step in runs] == [20, 40, 60]
    assert [(name, value, step) for numbers, step in runs for name, value in numbers.items()] == scalars
    last, _ = runs[-1]
    assert last["0/H_A/kept"] > 0 and {"loss", "2/H_G/damping", "0/leverage"} <= last.keys()
    assert all(isinstance(value, int | float) for value in last.values())


# ------------------------------------------------------------------ the page


def test_the_page_names_every_loop() -> None:
    named = set(re.findall(r"\]\(\.\./examples/loops/(\w+)\.py\)", PAGE))
    assert named == {path.stem for path in Path(FOLDER).glob("*.py")}
