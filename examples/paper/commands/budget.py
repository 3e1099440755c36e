"""Options that say when a run ends."""

from dataclasses import dataclass

from examples.paper.defaults import Overrides


@dataclass(frozen=True)
class Budget:
    """When a run ends, with whichever comes first; the paper's own budget where none is given."""

    epochs: int | None = None
    """End after so many epochs."""
    seconds: float | None = None
    """End after so many seconds of training; warm start and evaluation do not count."""
    max_steps: int | None = None
    """End after so many iterations."""
    decay_every: int | None = None
    """Multiply the learning rate by 0.1 after every so many epochs; 0 for never."""
    evaluate_every: int | None = None
    """Evaluate after every so many epochs, and at the end."""
    batch_size: int | None = None
    """m, if it is not the paper's."""
    data_limit: int | None = None
    """Use so many training data only."""

    def fields(self) -> Overrides:
        """As fields of a cell."""
        values = {("steps" if name == "max_steps" else name): value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None}
