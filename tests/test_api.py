"""Every public name has a place in the API reference, and every argument a sentence."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kfqn_ext.optim.groups.sentences import complete_args

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/api").glob("*.rst"))
PUBLIC = [
    "kfqn_ext",
    "kfqn_ext.curvature",
    "kfqn_ext.errors",
    "kfqn_ext.extensions",
    "kfqn_ext.geometry",
    "kfqn_ext.linalg",
    "kfqn_ext.linalg.operators",
    "kfqn_ext.linalg.splits",
    "kfqn_ext.optim",
    "kfqn_ext.optim.groups.schedules",
    "kfqn_ext.optim.inverses",
    "kfqn_ext.optim.lengths",
    "kfqn_ext.optim.others",
    "kfqn_ext.optim.recipe",
    "kfqn_ext.optim.targets",
]
DIRECTIVE = re.compile(r"^\.\. (module|currentmodule|auto\w+):: (\S+)$", re.MULTILINE)


def named(path: str) -> Any:
    """What a dotted path of the reference stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def documented(page: str) -> Iterator[str]:
    """The names that a page of the reference describes."""
    module = ""
    for directive, name in DIRECTIVE.findall(page):
        if "module" in directive:
            module = name
        else:
            yield name if name.startswith("kfqn_ext.") else f"{module}.{name}"


def public() -> dict[str, Any]:
    """All public objects by the first of their names; what several modules show is there once."""
    found: dict[str, Any] = {}
    for module in map(import_module, PUBLIC):
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType):
                found.setdefault(name, getattr(module, name))
    return found


REFERENCE = [name for page in PAGES for name in documented(page.read_text())]


def test_every_public_name_has_a_page() -> None:
    described = {name.rpartition(".")[2]: named(name) for name in REFERENCE}
    assert [name for name, thing in public().items() if described.get(name) is not thing] == []


def test_no_name_is_described_twice() -> None:
    assert len(REFERENCE) == len(set(REFERENCE)) > 100


def test_a_name_without_a_page_is_found() -> None:
    assert list(documented(".. module:: kfqn_ext.a\n.. autoclass:: B\n.. autofunction:: kfqn_ext.c.d\n")) == [
        "kfqn_ext.a.B",
        "kfqn_ext.c.d",
    ]


# ------------------------------------------------------------------ arguments

ENTRY = re.compile(r"^ +\*{0,2}(\w+): +\S", re.MULTILINE)


def docstrings(thing: Any) -> str:
    """Where the arguments of a function, or of a class's constructor, are told."""
    if not isinstance(thing, type):
        return thing.__doc__ or ""
    classes = thing.__mro__ if is_dataclass(thing) else [thing.__init__]  # fields come from bases too
    return "\n".join(each.__doc__ or "" for each in classes if not str(each.__module__).startswith("torch"))


def untold(thing: Any) -> list[str]:
    """Arguments without a sentence."""
    arguments = [name for name in inspect.signature(thing).parameters if name != "self"]
    return [name for name in arguments if name not in ENTRY.findall(docstrings(thing))]


def has_arguments(thing: Any) -> bool:
    if isinstance(thing, type):
        return not issubclass(thing, Enum | Exception) and thing.__init__ is not object.__init__
    return inspect.isfunction(thing)


CALLABLE = {name: thing for name, thing in public().items() if has_arguments(thing)}
AS_PRINTED = {f"{name}.as_printed": thing.as_printed for name, thing in CALLABLE.items() if "as_printed" in vars(thing)}
AS_PRINTED.pop("KroneckerOptimizer.as_printed")  # hands everything on


@pytest.mark.parametrize("name", [*CALLABLE, *AS_PRINTED])
def test_every_argument_has_a_sentence(name: str) -> None:
    assert untold({**CALLABLE, **AS_PRINTED}[name]) == []


def test_an_argument_without_a_sentence_is_found() -> None:
    def f(told: int, forgotten: int, empty: int) -> None:
        """Do it.

        Args:
            told: What this is.
            empty:
        """

    assert untold(f) == ["forgotten", "empty"]


def test_the_sentences_of_optimizers_are_their_own_where_they_differ() -> None:
    """And of the whole family where they do not: written once."""
    from kfqn_ext import KBFGS

    assert "damping: ε > 0" in (KBFGS.__init__.__doc__ or "")
    assert "damping: λ > 0" in (KBFGS.as_printed.__doc__ or "")
    assert "shard_state: Divide the state" in (KBFGS.__init__.__doc__ or "")
    assert KBFGS.__init__.__doc__ is not None and "ValueError: If a hyperparameter is out" in KBFGS.__init__.__doc__


def test_sentences_are_put_together() -> None:
    shared = "All.\n\nArgs:\n    a: One,\n        on two.\n    **rest: Below.\n    b: Two.\n\nRaises:\n    E: No."
    own = "Own.\n\nArgs:\n    b: My own.\n"
    assert complete_args(own, shared, ["b", "a"]) == (
        "Own.\n\nArgs:\n    b: My own.\n    a: One,\n        on two.\n\nRaises:\n    E: No."
    )
