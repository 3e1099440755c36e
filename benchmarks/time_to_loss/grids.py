"""Who races, and which settings each may choose from, by problem. What is not tuned has one setting, the empty one."""

from collections.abc import Sequence

from benchmarks.untuned.entry import Entry, Setting, pairs, rates
from benchmarks.untuned.lists import ENTRIES

OPTIMIZERS: dict[str, Entry] = {
    name: ENTRIES[name]
    for name in ("onepass", "kbfgs", "kbfgs-tuned", "sgdm", "adam", "muon", "soap", "shampoo", "kfac")
}


def _shampoo(*values: tuple[float, int]) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "preconditioning_compute_steps": every} for lr, every in values)


_SHAMPOO = _shampoo((0.03, 10), (0.1, 10), (0.1, 1))
_OF_CLASSIFIERS = {
    "kbfgs-tuned": pairs((0.03, 0.3), (0.1, 0.1), (0.03, 0.03)),
    "sgdm": rates(0.01, 0.03, 0.1),
    "adam": rates(1e-3, 3e-3, 1e-2),
    "muon": rates(3e-3, 1e-2, 3e-2),
    "soap": rates(1e-3, 3e-3, 1e-2),
    "shampoo": _SHAMPOO,
    "kfac": pairs((0.03, 0.1), (0.03, 0.01), (0.1, 0.01)),
}
_GRIDS = {
    # Around what the paper found for the autoencoder, at its minibatches.
    "autoencoder": {
        "kbfgs-tuned": pairs((0.03, 1.0), (0.03, 0.3), (0.1, 1.0)),
        "sgdm": rates(1e-3, 3e-3, 1e-2),
        "adam": rates(3e-4, 1e-3, 3e-3),
        "muon": rates(1e-3, 3e-3, 1e-2),
        "soap": rates(1e-3, 3e-3, 1e-2),
        "shampoo": _SHAMPOO,
        "kfac": pairs((0.03, 0.3), (0.1, 1.0), (0.3, 10.0)),
    },
    "vgg": _OF_CLASSIFIERS,
    "resnet": _OF_CLASSIFIERS,
}


def grid(problem: str, optimizer: str) -> Sequence[Setting]:
    """The settings that an optimizer may choose from."""
    return _GRIDS[problem].get(optimizer, ({},))
