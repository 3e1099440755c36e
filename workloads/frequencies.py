"""How often an optimizer learns and inverts, set from outside."""

from kfqn_ext.optim import KroneckerOptimizer
from kfqn_ext.optim.groups.hyperparameters import UPDATE_FREQS


def set_frequencies(optimizer: KroneckerOptimizer, learn_every: int, invert_every: int) -> None:
    """Set T (KFAC's T₁) and T₂ of all groups."""
    for group in optimizer.param_groups:
        group.update({name: learn_every for name in UPDATE_FREQS if name in group}, inverse_update_freq=invert_every)
