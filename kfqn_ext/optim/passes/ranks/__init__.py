"""Several processes: what each measures of its share of a batch becomes what one process would measure of the whole."""

from kfqn_ext.optim.passes.ranks.ranks import Chosen, Directions, OneProcess, Ranks, SeveralProcesses, ranks_of

__all__ = ["Chosen", "Directions", "OneProcess", "Ranks", "SeveralProcesses", "ranks_of"]
