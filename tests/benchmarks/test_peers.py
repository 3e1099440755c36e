"""Other packages' optimizers do what their rows say: curvature in steps that are due, and in no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS
from benchmarks.problems import QUICK, Setup, set_up


def _curvlinops(held: Any) -> list[Tensor]:
    inverse = held["inverse"]
    return [*inverse._inverse_input_covariances.values(), *inverse._inverse_gradient_covariances.values()]


def _singd(optimizer: Any) -> list[Tensor]:
    return [factor.to_dense() for factor in (*optimizer.Ks.values(), *optimizer.Cs.values())]


def _asdfghjkl(held: Any) -> list[Tensor]:
    maker, _ = held
    krons = [module.fisher.kron for module in maker.modules_for_curvature]
    return [inverse for kron in krons for inverse in (kron.A_inv, kron.B_inv)]


def _shampoo(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for key, value in state.items() if key.startswith("inv_pre")]


# What gradients are multiplied by.
CURVATURE: dict[str, Callable[[Any], list[Tensor]]] = {
    "curvlinops": _curvlinops,
    "singd": _singd,
    "asdfghjkl": _asdfghjkl,
    "shampoo": _shampoo,
}


def test_all_peers_are_here() -> None:
    assert {name for name, contender in CONTENDERS.items() if contender.package is not None} == set(CURVATURE)


@pytest.mark.filterwarnings("ignore")  # other packages use what torch has deprecated
@pytest.mark.parametrize("name", CURVATURE)
def test_curvature_changes_in_steps_that_are_due(name: str) -> None:
    setup = ready_for(name)
    ready = CONTENDERS[name].build(setup)
    assert list(ready.steps) == ["ordinary", "due"]
    for kind, step in ready.steps.items():
        before = [tensor.clone() for tensor in CURVATURE[name](ready.holds)]
        setup.x.mul_(0.5)  # another minibatch: what is learned from it is not what was there
        step()
        after = CURVATURE[name](ready.holds)
        assert len(after) == len(before) > 0
        changed = not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert changed == (kind == "due"), kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("problem", "loss"), [("autoencoder", "mse"), ("vgg16", "cross_entropy")])
def test_asdfghjkl_samples_from_the_loss_it_has(problem: str, loss: str) -> None:
    """It has none for binary cross entropy; a softmax over pixels would be another network's."""
    maker, _ = CONTENDERS["asdfghjkl"].build(ready_for("asdfghjkl", problem)).holds
    assert maker.fisher_maker.config.loss_type == loss


def ready_for(name: str, problem: str = "autoencoder") -> Setup:
    """A small network, where the package is installed."""
    pytest.importorskip(str(CONTENDERS[name].package))
    return set_up(QUICK[problem], torch.device("cpu"))
