"""Who may import whom outside the package, and names that stand for one thing."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = ("benchmarks", "examples", "workloads")


def imports(file: Path) -> set[str]:
    """The top-level packages that a file imports, inside functions too; a relative import stays in its own."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("importer", "others"),
    [
        ("kfqn_ext", {*OUTSIDE, "tests"}),
        ("workloads", {"benchmarks", "examples", "tests"}),
        ("benchmarks", {"examples", "tests"}),
        ("examples", {"benchmarks", "tests"}),
    ],
)
def test_imports_go_one_way(importer: str, others: set[str]) -> None:
    """workloads/ is what benchmarks/ and examples/ share; neither knows the other."""
    files = list((ROOT / importer).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): both for file in files if (both := imports(file) & others)} == {}


def test_the_check_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import examples.paper\n\ndef f():\n    from tests.cases import x\n")
    assert imports(file) == {"examples", "tests"}


def classes(folder: str) -> list[str]:
    trees = [ast.parse(file.read_text()) for file in (ROOT / folder).rglob("*.py")]
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_one_name() -> None:
    """In the package and beside it, tests apart."""
    found = Counter(name for folder in ("kfqn_ext", *OUTSIDE) for name in classes(folder))
    assert [name for name, count in found.items() if count > 1] == []
