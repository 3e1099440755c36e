"""docs/paper-map.md has a row for each label of the paper; the code, tests and labels that its rows name are there."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/paper-map.md").read_text()
PAPERS = ("https://arxiv.org/abs/2102.06737", "https://arxiv.org/abs/2006.08877")
ABOUT_METHODS = (
    "README.md",
    *(f"docs/{page}.md" for page in ("curvature", "design", "optimizers", "paper-map", "performance", "results")),
)
NONE = "–"
LABEL = re.compile(r"(?<!\w)(?:algo|assumption|eq|fig|lemma|line|sec|table|thm)_(?:\{\d+\.\d+\}|\d+(?:\.\d+)?)(?!\w)")

# All labels of the paper. What is printed is the place in a list, which follows the LaTeX source; (7) has no label.
EQUATIONS = "eq_12 eq_19 eq_5 eq_{1.5} eq_2 eq_2.5 - eq_4 eq_8 eq_18 eq_13 eq_6 eq_7 eq_1 eq_14 eq_23 eq_9"
ALGORITHMS = "algo_5 algo_8 algo_7 algo_6 algo_1"
TABLES = "table_4 table_5 table_1 table_7 table_3 table_2 table_8 table_6"
FIGURES = "fig_6 fig_3 fig_4 fig_5 fig_7 fig_8 fig_9"
STATEMENTS = "lemma_3 lemma_4 lemma_5 assumption_1 assumption_2 assumption_4 lemma_1 thm_3"  # one counter, in Section 5
LINES = {
    "line_12": (2, 5),
    "line_14": (2, 10),
    "line_13": (2, 11),
    "line_5": (5, 8),
    "line_3": (5, 14),
    "line_11": (5, 19),
}
SECTIONS = {
    **{"sec_1": "Section 2", "sec_13": "Section 3.2.1", "sec_12": "Section 3.2.2", "sec_9": "Section 6"},
    **{"sec_17": "Section 6.1", "sec_14": "Appendix A", "sec_18": "Appendix A.3", "sec_11": "Appendix B"},
    **{"sec_2": "Appendix C", "sec_4": "Appendix C.1", "sec_10": "Appendix D.1", "sec_15": "Appendix D.2"},
    **{"sec_16": "Appendix D.2.1", "sec_5": "Appendix D.3"},
}


def counted(labels: str, printed: str) -> dict[str, str]:
    return {label: printed.format(i) for i, label in enumerate(labels.split(), start=1) if label != "-"}


def statement(label: str) -> str:
    return {"lemma": "Lemma", "assumption": "Assumption", "thm": "Theorem"}[label.partition("_")[0]]


PRINTED = {
    **counted(EQUATIONS, "({})"),
    **counted(ALGORITHMS, "Algorithm {}"),
    **counted(TABLES, "Table {}"),
    **counted(FIGURES, "Figure {}"),
    "thm_4": "Theorem 2.1",
    **{label: f"{statement(label)} {number}" for label, number in counted(STATEMENTS, "5.{}").items()},
    **{label: f"Algorithm {algorithm}, line {line}" for label, (algorithm, line) in LINES.items()},
    **SECTIONS,
}


# ------------------------------------------------------------------ the page


@dataclass(frozen=True)
class Row:
    """A row; without code, ``reason`` says why."""

    label: str
    printed: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    reason: str


def rows(page: str) -> list[Row]:
    found = []
    for line in page.splitlines():
        if line.startswith("| `"):
            label, printed, _, code, last = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            none = code == NONE
            names = () if none else tuple(code.split(", "))
            found.append(Row(label, printed, names, () if none else tuple(last.split(", ")), last if none else ""))
    return [Row(row.label.strip("`"), row.printed, bare(row.code), bare(row.tests), row.reason) for row in found]


def bare(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.strip("`") for name in names)


# ------------------------------------------------------------------ what code says


def strings(tree: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def comments(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def labels(texts: Iterable[str]) -> set[str]:
    return {label for text in texts for label in LABEL.findall(text)}


def labels_in_file(file: Path) -> set[str]:
    """In a page, or in docstrings, strings and comments of code."""
    text = file.read_text()
    if not LABEL.search(text):
        return set()
    if file.suffix == ".md":
        return labels([text])
    return labels([*strings(ast.parse(text)), *(comment for _, comment in comments(text))])


def files(*places: str) -> list[Path]:
    found = [f for place in places for kind in ("*.py", "*.md") for f in (ROOT / place).rglob(kind)]
    return [f for f in found if f.resolve() != Path(__file__).resolve()]


def definition(tree: ast.Module, name: str) -> ast.stmt | None:
    """Where a name such as ``Class.method`` is defined."""
    body, found = tree.body, None
    for part in name.split("."):
        found = next((node for node in body if part in names_of(node)), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def labels_of(text: str, node: ast.stmt) -> set[str]:
    """What a definition says, or its module in docstring and comments that belong to no other definition."""
    tree = ast.parse(text)
    others = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    of_others = {line for n in others for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)} - set(inside)
    said = [comment for line, comment in comments(text) if line not in of_others]
    return labels([*strings(node), *said, ast.get_docstring(tree) or ""])


# ------------------------------------------------------------------ what can be wrong


def faults_of_labels(page: str) -> list[str]:
    """A label without a row, twice, of another paper, or with another number."""
    found = rows(page)
    count = Counter(row.label for row in found)
    faults = [f"{label} has no row" for label in PRINTED if label not in count]
    faults += [f"{label} has {n} rows" for label, n in count.items() if n > 1]
    faults += [f"{label} is no label of the paper" for label in count if label not in PRINTED]
    faults += [f"{r.label} is {r.printed}" for r in found if PRINTED.get(r.label, r.printed) != r.printed]
    return faults


def faults_of_rows(page: str) -> list[str]:
    """Code that can't be imported or does not name the label, a test that is not there, and no reason."""
    faults = []
    for row in rows(page):
        faults += [f"{row.label}: {fault}" for name in row.code if (fault := fault_of_code(name, row.label))]
        faults += [f"{row.label}: {fault}" for name in row.tests if (fault := fault_of_test(name))]
        if not row.code and (not re.search(r"\w", row.reason) or "::" in row.reason):
            faults.append(f"{row.label}: no code, and no reason")
    return faults


def fault_of_code(name: str, label: str) -> str | None:
    match = re.fullmatch(r"([\w.]+):([\w.]+)", name)
    if match is None:
        return f"{name!r} is not module:name"
    try:
        found: object = import_module(match[1])
        for part in match[2].split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return str(error)
    text = Path(str(import_module(match[1]).__file__)).read_text()
    node = definition(ast.parse(text), match[2])
    if node is None:
        return f"{name} is defined elsewhere"
    return None if label in labels_of(text, node) else f"{name} does not mention {label}"


def fault_of_test(name: str) -> str | None:
    match = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)", name)
    if match is None:
        return f"{name!r} is not tests/file.py::test_name"
    file = ROOT / match[1]
    there = file.is_file() and isinstance(definition(ast.parse(file.read_text()), match[2]), ast.FunctionDef)
    return None if there else f"{name} is not there"


def faults_of_source(page: str, source: Iterable[Path], needs_code: bool) -> list[str]:
    """A label that is mentioned and has no row, or none with code."""
    known = {row.label for row in rows(page) if row.code or not needs_code}
    return [f"{file}: {label}" for file in source for label in sorted(labels_in_file(file) - known)]


def faults_of_links(texts: Iterable[str]) -> list[str]:
    """A paper that is not linked once."""
    return [f"{text[:30]!r}: {paper}" for text in texts for paper in PAPERS if text.count(f"({paper})") != 1]


# ------------------------------------------------------------------ the tests


def test_there_is_one_row_for_each_label_with_its_number() -> None:
    assert len(PRINTED) == 65
    assert faults_of_labels(PAGE) == []


def test_code_and_tests_of_each_row_are_there_and_the_code_says_the_label() -> None:
    assert faults_of_rows(PAGE) == []


def test_labels_in_the_package_have_a_row_with_code() -> None:
    source = files("kfqn_ext")
    assert len({label for file in source for label in labels_in_file(file)}) > 30
    assert faults_of_source(PAGE, source, needs_code=True) == []


def test_labels_anywhere_else_have_a_row() -> None:
    places = files("workloads", "examples", "benchmarks", "tests", "docs")
    assert faults_of_source(PAGE, [*places, ROOT / "README.md"], needs_code=False) == []


def test_pages_about_the_methods_link_both_papers() -> None:
    assert faults_of_links((ROOT / page).read_text() for page in ABOUT_METHODS) == []
    for page, link in (("README.md", "docs/paper-map.md"), ("docs/design.md", "paper-map.md")):
        assert f"]({link})" in (ROOT / page).read_text()


def line_of(label: str) -> str:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{label}` |")]
    return line


CODE, TEST = "kfqn_ext.linalg.damping:powell_lm", "tests/linalg/test_damping.py::test_algo_5"


@pytest.mark.parametrize(
    ("check", "old", "new", "fault"),
    [
        (faults_of_labels, line_of("eq_13"), "", "eq_13 has no row"),
        (faults_of_labels, line_of("eq_13"), f"{line_of('eq_13')}\n{line_of('eq_13')}", "eq_13 has 2 rows"),
        (faults_of_labels, "| `eq_13` |", "| `eq_99` |", "eq_99 is no label of the paper"),
        (faults_of_labels, "| `eq_13` | (11) |", "| `eq_13` | (12) |", "eq_13 is (12)"),
        (faults_of_rows, CODE, CODE.replace("powell_lm", "powel"), "has no attribute 'powel'"),
        (faults_of_rows, CODE, CODE.replace("damping", "dampling"), "No module named 'kfqn_ext.linalg.dampling'"),
        (faults_of_rows, CODE, CODE.replace(".damping", ""), "is defined elsewhere"),
        (faults_of_rows, CODE, CODE.replace("powell_lm", "dot"), "is defined elsewhere"),
        (faults_of_rows, CODE, CODE.replace("powell_lm", "double_damping_2020"), "does not mention algo_5"),
        (faults_of_rows, CODE, CODE.replace(":", "."), "is not module:name"),
        (faults_of_rows, TEST, TEST + "0", "is not there"),
        (faults_of_rows, TEST, TEST.replace("damping", "dampling"), "is not there"),
        (faults_of_rows, TEST, TEST.replace("::", ":"), "is not tests/file.py::test_name"),
        (faults_of_rows, f"`{CODE}`", NONE, "algo_5: no code, and no reason"),
    ],
)
def test_each_check_of_the_page_can_fail(check: Callable[[str], list[str]], old: str, new: str, fault: str) -> None:
    page = PAGE if check is faults_of_labels else line_of("algo_5")
    assert old in page and check(page) == []
    assert any(fault in found for found in check(page.replace(old, new)))


def test_the_checks_of_the_source_can_fail(tmp_path: Path) -> None:
    wrong, file = "eq_" + "99", tmp_path / "file.py"
    for text in (f'"""Solves ``{wrong}``."""\n', f"x = 1  # {wrong} of the paper\n", f'x = f"{{y}} by {wrong}"\n'):
        file.write_text(text)
        assert faults_of_source(PAGE, [file], needs_code=False) == [f"{file}: {wrong}"]
    file.write_text("eq_99 = test_eq_99 = 1\n")  # names are no labels
    assert faults_of_source(PAGE, [file], needs_code=False) == []
    file.write_text("# as in fig_3\n")  # which has no code
    assert faults_of_source(PAGE, [file], needs_code=False) == []
    assert faults_of_source(PAGE, [file], needs_code=True) == [f"{file}: fig_3"]
    assert len(faults_of_links([f"[a]({PAPERS[0]}) [b]({PAPERS[0]})"])) == 2


def test_a_label_in_another_definition_does_not_count() -> None:
    text = '"""On eq_1."""\n# On eq_2.\n\n\ndef f():\n    """On eq_4."""\n\n\ndef g():\n    return 1  # eq_5\n'
    node = definition(ast.parse(text), "g")
    assert node is not None and labels_of(text, node) == {"eq_1", "eq_2", "eq_5"}
