"""The table of what users report of several processes names cases and tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = "## Faults that users report of several processes"


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def is_run(function: ast.FunctionDef) -> bool:
    """By pytest, or as a case."""
    made = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return function.name.startswith("test_") or any(isinstance(name, ast.Name) and name.id == "case" for name in made)


def test_every_thread_has_a_test_that_exists() -> None:
    text = (ROOT / "tests" / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 15
    for row in rows:
        ids = re.findall(r"`([^`]*)::([^`]*)`", row.split("|")[-2])
        assert ids, row
        for file, name in ids:
            found = functions(ROOT / file)
            assert name in found and is_run(found[name]), (file, name)
