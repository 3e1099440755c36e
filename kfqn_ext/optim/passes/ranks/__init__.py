"""Several processes: what each measures of its share of a batch becomes what one process would measure of the whole."""

from kfqn_ext.optim.passes.ranks.pool import Chosen, Directions, Pool
from kfqn_ext.optim.passes.ranks.ranks import OneProcess, Ranks, SeveralProcesses, ranks_of, seed_of

__all__ = ["Chosen", "Directions", "OneProcess", "Pool", "Ranks", "SeveralProcesses", "ranks_of", "seed_of"]
