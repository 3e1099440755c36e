"""Well-tuned peers: torch's and another package's optimizers as documented, and KFAC, each with five settings.

Each grid holds what was best on most of the problems that choices are made on, not at its end.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from benchmarks.untuned.entry import Entry, Optimizers, closure, of_parameters, pairs, rates
from kfqn_ext.optim import KFAC

_DECAY = 0.01  # AdamW's own


class FlatMuon(torch.optim.Muon):
    """torch's Muon, to which a convolution's weight is a matrix with a row for each output channel."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self._of = [(p, nn.Parameter(p.detach().flatten(1))) for p in params]  # the same memory
        super().__init__([flat for _, flat in self._of], **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p, flat in self._of:
            flat.grad = None if p.grad is None else p.grad.flatten(1)
        super().step()


def muon(model: nn.Module, lr: float) -> Optimizers:
    """Muon for the weights of hidden layers, AdamW for the rest, at one rate and decay as torch's documentation has it.

    Muon's own scale with AdamW at 3e-3 or 1e-2 for the rest, or without decay, was not better where choices are made.
    """
    hidden = hidden_weights(model)
    others = [p for p in model.parameters() if all(p is not w for w in hidden)]
    muon = FlatMuon(hidden, lr=lr, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw")
    return muon, AdamW(others, lr=lr, weight_decay=_DECAY)


def hidden_weights(model: nn.Module) -> list[Tensor]:
    """Weights of linear layers and convolutions but the last one, from which the output comes."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return [layer.weight for layer in layers[:-1]]


def _of_package(name: str, **options: Any) -> Callable[..., Optimizers]:
    """With the package's own defaults but for what is given; a package that is missing is a row that says so.

    SOAP's are those of its authors' README: eigenbases every ten steps, both averages 0.95. Shampoo's are roots at
    every step; taken every third or tenth, it diverges at the rates that are otherwise best. Its ε is a hundred times
    the package's, with which float32 does not resolve the smallest eigenvalues and single runs break off.
    """

    def build(model: nn.Module, **setting: float) -> Optimizers:
        import pytorch_optimizer

        return (getattr(pytorch_optimizer, name)(model.parameters(), **options, **setting),)

    return build


def _kfac(model: nn.Module, lr: float, damping: float) -> Optimizers:
    """In the form of the paper that is stable."""
    return (KFAC(model, lr=lr, damping=damping, stats_update_freq=1, momentum=0.9, recipe=KFAC.recipe_stable),)


_ADAM = rates(1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_KFAC_GRID = (0.03, 0.1), (0.03, 0.03), (0.03, 0.01), (0.1, 0.01), (0.3, 0.01)

PEERS = {
    "sgdm": Entry("SGD-m", of_parameters(partial(SGD, momentum=0.9)), rates(3e-3, 1e-2, 3e-2, 1e-1, 3e-1)),
    "adam": Entry("Adam", of_parameters(Adam), _ADAM),
    "adamw": Entry("AdamW", of_parameters(partial(AdamW, weight_decay=_DECAY)), _ADAM),
    "muon": Entry("Muon, and AdamW for the rest", muon, rates(1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    "soap": Entry("SOAP", _of_package("SOAP"), rates(1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    "shampoo": Entry("Shampoo", _of_package("Shampoo", matrix_eps=1e-4), rates(0.03, 0.1, 0.3, 1.0, 3.0)),
    "kfac": Entry("KFAC, α and λ tuned", _kfac, pairs(*_KFAC_GRID), closure, samples=True),
}
