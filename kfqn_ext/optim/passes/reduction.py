"""What a pass has shown on this process, and what it would have shown with the data of all."""

from typing import Protocol

from kfqn_ext.optim.passes.measurement import Results


class Reduction(Protocol):
    """Pools the results of a pass over processes."""

    def pooled(self, results: Results) -> Results:
        """What one process with the data of all would have found; called by all of them where a pass ends."""


class OneProcess:
    """Nothing to pool."""

    def pooled(self, results: Results) -> Results:  # noqa: D102
        return results
