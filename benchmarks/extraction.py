"""What it costs to have curvature quantities of a minibatch beside its gradient, without any optimizer."""

from collections.abc import Callable

from backpack import backpack, extend
from backpack.extensions import KFAC
from torch import nn

from benchmarks.peers import curvlinops_operator
from benchmarks.problems import Setup
from benchmarks.turns import Run
from kfqn_ext import KBFGSQuantities, KFACFactors
from kfqn_ext import extend as extend_in_place

PLAIN = "plain forward-backward"


def _plain(setup: Setup) -> Run:
    return setup.batch


def _kbfgs_quantities(setup: Setup) -> Run:
    extend_in_place(setup.model)
    return lambda: _with(KBFGSQuantities(probe=lambda module, a_bar: a_bar), setup.batch)


def _kfac_factors(setup: Setup) -> Run:
    extend_in_place(setup.model)
    return lambda: _with(KFACFactors(), setup.batch)


def _backpack_kfac(setup: Setup) -> Run:
    # BackPACK's binary cross entropy is for scalar outputs: an autoencoder gets squared error.
    loss_fn = extend(nn.MSELoss() if setup.workload.classes is None else nn.CrossEntropyLoss())
    model = extend(setup.model)

    def run() -> None:
        model.zero_grad()
        _with(KFAC(), lambda: loss_fn(model(setup.x), setup.y).backward())

    return run


def _curvlinops_kfac(setup: Setup) -> Run:
    def run() -> None:
        setup.batch()  # its own passes are for the factors alone
        curvlinops_operator(setup).compute_kronecker_factors()

    return run


def _with(extension: object, run: Run) -> None:
    with backpack(extension):
        run()


EXTRACTIONS: dict[str, Callable[[Setup], Run]] = {
    PLAIN: _plain,
    "KBFGSQuantities(probe=…)": _kbfgs_quantities,
    "KFACFactors()": _kfac_factors,
    "BackPACK's KFAC": _backpack_kfac,
    "curvlinops' KFAC": _curvlinops_kfac,
}
