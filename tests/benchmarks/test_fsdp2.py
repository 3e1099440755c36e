"""What FSDP2's steps send is what the formulas say; of small networks, with processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_counts_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Beside an update's numbers go two counts for each quantity of a layer, and what ranks agree on."""
    log = tmp_path / "fsdp2.jsonl"
    command = [sys.executable, "-m", "benchmarks.fsdp2", "--quick", "--json", str(log)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    for found in json.loads(log.read_text())["found"].values():
        _, rows, formula, update, formula_of_update = found["bytes"]
        assert rows == formula
        assert formula_of_update <= update <= 1.05 * formula_of_update
        assert found["messages"][:2] == [2, 1]
