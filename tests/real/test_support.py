"""Every row of the support matrix, and that what is written about them is up to date."""

import ast
import re
from pathlib import Path

import pytest

from tests.real import matrix
from tests.real.support import ROWS, Row

ROOT = Path(__file__).parents[2]


# They start processes or train for long; tests/distributed has more of the former that are quick.
LONG = {
    "processes-distributeddataparallel",
    "processes-fsdp2",
    "memory-200-steps",
    "state-distributed-checkpoints",
    "state-loading-twice",
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id, marks=pytest.mark.slow if row.id in LONG else ()) for row in ROWS]
)
def test_row(row: Row) -> None:
    row.check()


def test_rows_have_names_of_their_own_and_a_verdict() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS) and {row.id for row in ROWS} >= LONG
    assert {row.verdict for row in ROWS} == {"works", "momentum", "refused"}
    assert all(row.why for row in ROWS)


def test_the_matrix_in_the_documentation_is_up_to_date() -> None:
    assert matrix.FILE.read_text() == matrix.text(), "python -m tests.real.matrix"


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_report_of_the_field_has_a_test_that_exists() -> None:
    lines = [line for line in (ROOT / "tests" / "README.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    numbers = [int(line.split("|")[1]) for line in lines]
    assert len(numbers) == len(set(numbers)) == 62
    for line in lines:
        ids = re.findall(r"`([^`]*::[^`]*)`", line.split("|")[-2])
        assert ids, line
        for one in ids:
            file, name = one.split("::")
            function, _, case = name.partition("[")
            assert function in functions_of(ROOT / file), one
            if file.endswith("real/test_support.py") and case:
                assert case.rstrip("]") in {row.id for row in ROWS}, one
