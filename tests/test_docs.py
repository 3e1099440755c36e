"""Examples in docstrings run as they stand. (Those in README.md and docs/ are collected by pytest-markdown-docs.)"""

import doctest
import pkgutil
from importlib import import_module

import pytest

import kfqn_ext

MODULES = [m.name for m in pkgutil.walk_packages(kfqn_ext.__path__, "kfqn_ext.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [t for name in MODULES for t in finder.find(import_module(name)) if t.examples]
    assert len({t.name.rsplit(".", 1)[-1] for t in examples}) > 5
