"""The tests that are marked for a GPU, in a process of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import Place

_ROOT = Path(__file__).parents[2]
_LINES = 40
_WORKERS = "4"


def measure(place: Place) -> dict[str, Any]:
    """Run them, in the time that is left; on a CPU, see that they are there.

    Raises:
        RuntimeError: If one fails, none runs, or the time is over before they are through.
    """
    how = ["-n", _WORKERS, "--durations=5", "tests"] if place.is_gpu else ["--collect-only", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *how]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=max(1.0, place.seconds_left))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not through after {place.seconds_left:.0f} s") from None
    last = "\n".join(done.stdout.splitlines()[-_LINES:])
    # An exit status of 5 is that no test was collected: a check that checks nothing must not pass on a GPU.
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}\n{last}")
    return {"last lines": last}


def render(found: dict[str, Any]) -> str:
    return f"```\n{found['last lines']}\n```"
