"""Backward passes that nobody announces: what they have shown since the last step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kfqn_ext.optim.passes.measurement import Measurement


class Listening:
    """Holds the measurement of the passes that add up to the gradient of the next step.

    Attributes:
        is_paused: Whether a pass runs that was announced, and is measured as such.
    """

    def __init__(self) -> None:
        """Nothing was heard yet."""
        self.is_paused = False
        self._measurement: Measurement | None = None
        self._lock = threading.Lock()

    def measurement(self, begin: Callable[[], Measurement]) -> Measurement:
        """That of the next step, from ``begin`` where its first pass runs now."""
        with self._lock:  # autograd has a thread for each device, and the first layers of two may come at once
            if self._measurement is None:
                measurement = begin()
                for ext in measurement.extensions:
                    ext.follows_grad = True
                self._measurement = measurement
            return self._measurement

    @property
    def is_idle(self) -> bool:
        """Whether the step that comes is known to need no measurement."""
        return self._measurement is not None and not self._measurement.extensions

    def take(self) -> Measurement | None:
        """That of the step that begins, which is then over; None where no pass has run since the last."""
        measurement, self._measurement = self._measurement, None
        return measurement

    def forget(self) -> None:
        """Leave what was heard: the gradient that it belongs to is gone."""
        self._measurement = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not listen in the body."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
