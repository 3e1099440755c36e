"""The example loops, as they are shipped; a trainer that is not installed skips its rows."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kfqn_ext.optim import KBFGS, Minibatch

FOLDER = Path(__file__).parents[2] / "examples" / "loops"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples.loops.{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def their_warnings() -> Iterator[None]:
    """Trainers and what they import warn on their own; ours stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="kfqn_ext")
        yield


def learned(losses: list[float]) -> None:
    assert losses[-1] < 0.5 * losses[0], losses


def plain() -> None:
    learned(example("plain").main(40))


def accelerate() -> None:
    pytest.importorskip("accelerate")
    with their_warnings():
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # of another loop in this process
        learned(example("accelerate_loop").main())


def lightning() -> None:
    """And its checkpoint holds the optimizer's state, with H as it was."""
    with their_warnings():
        pytest.importorskip("lightning")
        with TemporaryDirectory() as folder:
            learned(example("lightning_loop").main(folder=folder))
            saved = torch.load(f"{folder}/last.ckpt", weights_only=True)
    state = saved["optimizer_states"][0]["state"][0]
    assert state["H_A"].dtype == torch.float32 and saved["optimizer_states"][0]["param_groups"][0]["step"] == 32


def phases_of_a_wrapper() -> None:
    with their_warnings():
        pytest.importorskip("lightning")
        from lightning.pytorch.core.optimizer import LightningOptimizer
    wrapper: Any = LightningOptimizer(KBFGS(torch.nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match=r"optimizer\.optimizer\.first_pass"), wrapper.first_pass():
        pass


def lightning_automatic() -> None:
    """Its closure repeats the batch when it is called again, as for LBFGS."""
    with their_warnings():
        pytest.importorskip("lightning")
        module, seen = example("lightning_loop"), []

        class Automatic(module.Classifier):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = True
                seen.append(self)

            def training_step(self, batch: Any, index: int) -> Any:
                loss = self.loss(batch)
                self.losses.append(float(loss.detach()))
                return loss

            def on_train_epoch_end(self) -> None:
                """Lightning steps the schedule itself."""

        module.Classifier = Automatic
        module.main()
    learned(seen[0].losses)
    assert len(seen[0].losses) == 32 + 32  # T = 1 in the burn-in: each batch twice


def both_forms_at_once() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = KBFGS(model, lr=0.1, damping=1.0)
    batch = Minibatch(model, F.cross_entropy, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    optimizer.zero_grad()
    with optimizer.first_pass():
        batch.loss().backward()
    with pytest.raises(RuntimeError, match=r"step\(closure\) after first_pass"):
        optimizer.step(batch)
