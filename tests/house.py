"""How much of the optimizer is one object, counted: attributes, who writes them, and calls that cross files.

python -m tests.house [class] [folder]
"""

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "kfqn_ext"


@dataclass(frozen=True)
class House:
    """What a class and its bases in a package are made of.

    Attributes:
        files: Where they are defined.
        attributes: Instance attributes, assigned to ``self`` in a method.
        shared: Those that methods in more than one file assign.
        crossing: Calls ``self.f()`` of a method that another file defines.
        lines: Of all files of the package's folder that the class is in.
    """

    files: list[str]
    attributes: list[str]
    shared: list[str]
    crossing: list[str]
    lines: int


def survey(name: str = "KBFGS", package: Path = PACKAGE) -> House:
    """Follow a class through its bases."""
    classes = {
        node.name: (path, node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    home, chain, waiting = classes[name][0].parent, [], [name]
    while waiting:
        current = waiting.pop()
        if current in classes:
            chain.append(classes[current])
            waiting += [base.id for base in classes[current][1].bases if isinstance(base, ast.Name)]
    written, defined, calls = defaultdict(set), defaultdict(set), []
    for path, node in chain:
        for method in (m for m in node.body if isinstance(m, ast.FunctionDef)):
            defined[method.name].add(path)
            written_here, called_here = _uses_of_self(method)
            calls += [(path, called) for called in called_here]
            for attribute in written_here:
                written[attribute].add(path)
    crossing = [f"{path.name}: self.{f}()" for path, f in calls if defined[f] and path not in defined[f]]
    return House(
        files=[str(path.relative_to(package)) for path, _ in chain],
        attributes=sorted(written),
        shared=sorted(attribute for attribute, paths in written.items() if len(paths) > 1),
        crossing=sorted(crossing),
        lines=sum(path.read_text().count("\n") for path in home.rglob("*.py")),
    )


def _uses_of_self(method: ast.FunctionDef) -> tuple[set[str], list[str]]:
    """Attributes of ``self`` that a method assigns, and its methods that it calls."""

    def is_own(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"

    nodes = list(ast.walk(method))
    assigned = {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_own(n) and isinstance(n.ctx, ast.Store)}
    called = [
        n.func.attr for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and is_own(n.func)
    ]
    return assigned, called


if __name__ == "__main__":
    house = survey(*sys.argv[1:2], *map(Path, sys.argv[2:3]))
    print(f"{house.lines} lines; the class is in {len(house.files)} files: {', '.join(house.files)}")
    print(f"{len(house.attributes)} instance attributes: {', '.join(house.attributes)}")
    print(f"{len(house.shared)} of them assigned in several files: {', '.join(house.shared)}")
    print(f"{len(house.crossing)} calls on self cross files")
