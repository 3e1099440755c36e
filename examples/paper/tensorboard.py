"""Logging to TensorBoard; imported only where it is asked for."""

from pathlib import Path
from typing import Any

_COLUMNS = ("minibatch_loss", "train_loss", "valid_loss", "valid_accuracy", "lr", "seconds")


class Writer:
    """Writes each epoch's record."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SystemExit("TensorBoard is not installed: pip install tensorboard") from None
        self._writer = SummaryWriter(str(directory))

    def __call__(self, record: dict[str, Any]) -> None:
        for name in _COLUMNS:
            if record["kind"] == "epoch" and record.get(name) is not None:
                self._writer.add_scalar(name, record[name], record["iteration"])
        self._writer.flush()
