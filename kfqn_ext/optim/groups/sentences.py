"""What docstrings say of arguments: sentences that a whole family shares are written once."""

import re
from collections.abc import Iterable
from inspect import cleandoc


def complete_args(own: str, shared: str, names: Iterable[str]) -> str:
    """A docstring that has a sentence for every argument.

    Args:
        own: The docstring as it is written.
        shared: That of the base, which has the sentences that are missing, and what is raised.
        names: The arguments, in order.

    Returns:
        The docstring, without indentation.
    """
    about, entries, rest = _parted(own)
    _, others, raises = _parted(shared)
    known = {**others, **entries}
    return f"{about}\n\nArgs:\n{''.join(known.get(name, '') for name in names)}\n{rest or raises}"


def _parted(docstring: str) -> tuple[str, dict[str, str], str]:
    """What comes before the arguments, their entries by name, and what comes after."""
    about, _, after = cleandoc(docstring).partition("\nArgs:\n")
    section, _, rest = after.partition("\n\n")
    entries = re.findall(r"^ {4}(\w+)(:.*\n(?: {8}.*\n)*)", f"{section}\n", re.MULTILINE)
    return about.rstrip(), {name: f"    {name}{text}" for name, text in entries}, rest
