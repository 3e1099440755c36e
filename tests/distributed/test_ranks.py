"""Real processes under gloo, which run all cases one after the other: to start them costs more than to run them."""

import datetime
import faulthandler
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

LIMIT = 60.0  # seconds of a case, after which it says where it hangs and ends its process


def work(rank: int, ranks: int, folder: str, quick: bool) -> None:
    """Run the cases as one rank, and write down how each ended."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    from tests.distributed import fsdp_cases, reported_cases  # noqa: F401 - which add to the others
    from tests.distributed.cases import CASES, QUICK

    out = Path(folder, f"rank{rank}.txt")
    for name, run in CASES.items():
        if quick and name not in QUICK:
            continue
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.stderr)
        try:
            run(ranks)
        except BaseException:  # noqa: BLE001 - whatever it is, the parent is to say it
            with out.open("a") as file:
                file.write(f"rank {rank} of {ranks}, {name}:\n{traceback.format_exc()}\n")
            os._exit(1)  # the others wait for this rank, and end with it
        finally:
            faulthandler.cancel_dump_traceback_later()
        distributed.barrier()
    out.with_suffix(".done").write_text(str(len(CASES)))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "quick"), [(2, True), *(pytest.param(ranks, False, marks=pytest.mark.slow) for ranks in (2, 4))]
)
@pytest.mark.timeout(480)
def test_processes_are_as_one(ranks: int, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of :mod:`tests.distributed.cases`, on all ranks, which have a seed of their own for hashes."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(work, (ranks, folder, quick), nprocs=ranks, join=False)
        try:
            while not context.join(timeout=5):
                pass
        except Exception as error:  # noqa: BLE001 - told with what the ranks have written
            told = "".join(path.read_text() for path in sorted(Path(folder).glob("rank*.txt")))
            raise AssertionError(told or str(error)) from None
        assert len(list(Path(folder).glob("*.done"))) == ranks
