"""Who races, and which settings each may choose from, by problem. What is not tuned has one setting, the empty one.

Where rates lie was seen in single runs of the first seed: smaller ones do not come far in so few seconds.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.untuned.entry import Entry, Setting, loop, of_model, pairs, rates
from benchmarks.untuned.lists import ENTRIES
from kfqn_ext.optim import KroneckerOptimizer, OnePassKBFGS, OnePassKFAC

_OURS = ("onepass", "onepass-kfac", "kbfgs", "kfac-untuned", "kbfgs-tuned")
_PEERS = ("sgdm", "adam", "muon", "soap", "shampoo", "kfac")


def _rounded(title: str, optimizer: type[KroneckerOptimizer]) -> Entry:
    return Entry(
        f"{title}, bfloat16 directions", of_model(partial(optimizer, direction_dtype=torch.bfloat16)), step=loop
    )


OPTIMIZERS: dict[str, Entry] = {
    **{name: ENTRIES[name] for name in (*_OURS, *_PEERS)},
    "onepass-bf16": _rounded("K-BFGS, one pass", OnePassKBFGS),
    "onepass-kfac-bf16": _rounded("KFAC, one pass", OnePassKFAC),
}


def _shampoo(*values: tuple[float, int]) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "preconditioning_compute_steps": every} for lr, every in values)


_OF_CLASSIFIERS = {
    "kbfgs-tuned": pairs((0.03, 0.3), (0.1, 0.1), (0.03, 0.03)),
    "sgdm": rates(0.03, 0.1, 0.3),
    "adam": rates(3e-3, 1e-2, 3e-2),
    "muon": rates(3e-3, 1e-2, 3e-2),
    "soap": rates(3e-3, 1e-2, 3e-2),
    "shampoo": _shampoo((0.1, 10), (0.3, 10), (0.3, 1)),
    "kfac": pairs((0.03, 0.1), (0.03, 0.01), (0.1, 0.01)),
}
_GRIDS = {
    # Around what the paper found for the autoencoder, at its minibatches.
    "autoencoder": {
        "kbfgs-tuned": pairs((0.03, 1.0), (0.03, 0.3), (0.1, 1.0)),
        "sgdm": rates(1e-3, 3e-3, 1e-2),
        "adam": rates(3e-4, 1e-3, 3e-3),
        "muon": rates(1e-3, 3e-3, 1e-2),
        "soap": rates(3e-3, 1e-2, 3e-2),
        "shampoo": _shampoo((0.003, 10), (0.01, 10), (0.03, 1)),
        "kfac": pairs((0.03, 0.3), (0.1, 1.0), (0.3, 10.0)),
    },
    "vgg": _OF_CLASSIFIERS,
    "resnet": _OF_CLASSIFIERS,
}


def grid(problem: str, optimizer: str) -> Sequence[Setting]:
    """The settings that an optimizer may choose from."""
    return _GRIDS[problem].get(optimizer, ({},))
