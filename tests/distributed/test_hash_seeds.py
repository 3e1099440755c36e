"""Two processes whose sets of strings have other orders, for good: what is sent must not follow a set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RANK = """
import sys
from torch import distributed
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
from tests.distributed import reported_cases
from tests.distributed.cases import CASES
for name, run in CASES.items():
    if name.startswith("layers that are alike"):
        run(2)
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_processes_with_other_hash_seeds(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": str(rank + 1)}
        command = [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")]
        ranks.append(
            subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | given, stderr=subprocess.PIPE, text=True)
        )
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=100)
            assert rank.returncode == 0, error
    finally:
        for rank in ranks:
            rank.kill()
