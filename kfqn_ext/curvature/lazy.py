"""Libraries that only this part of the package uses, imported when they are needed."""

from importlib import import_module
from typing import Any


def need(name: str, purpose: str) -> Any:
    """Import a library of the ``curvature`` extra.

    Args:
        name: The module.
        purpose: What it is needed for, for the message.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: If it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: pip install {package}", name=package
        ) from error
