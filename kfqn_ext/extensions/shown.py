"""Results are printed on one line: what they are, and the shapes of their tensors."""

from dataclasses import fields
from typing import Any

from torch import Tensor


class Shown:
    """A dataclass, made with ``repr=False``, that prints its tensors as their shapes."""

    def __repr__(self) -> str:
        """Describe all fields on one line."""
        own: Any = self
        return f"{type(self).__name__}({', '.join(f'{f.name}={described(getattr(own, f.name))}' for f in fields(own))})"


def described(value: object) -> str:
    """A tensor by its shape; anything else as it prints."""
    return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)
