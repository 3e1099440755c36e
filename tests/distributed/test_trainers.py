"""Accelerate's and Lightning's loops in two processes: the steps of one process that has the batches of both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import trainer_loops

REPOSITORY = Path(__file__).parents[2]
RANKS = 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_trainers_in_two_processes(tmp_path: Path) -> None:
    for name in ("accelerate", "lightning"):
        pytest.importorskip(name)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = subprocess.Popen(
        [*launch, "-m", "tests.distributed.trainer_loops", str(tmp_path)],
        cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        reference = trainer_loops.run(1)
        output, _ = ranks.communicate(timeout=200)
    finally:
        ranks.kill()
    assert ranks.returncode == 0, output
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]
    assert all(set(of_rank) == set(reference) for of_rank in found)
    for name, parameters in reference.items():
        for p, *of_ranks in zip(parameters, *(of_rank[name] for of_rank in found), strict=True):
            assert p.dtype == torch.float64 and torch.equal(*of_ranks), name
            assert float((of_ranks[0] - p).abs().max()) < 1e-10 * float(p.abs().max()), name
