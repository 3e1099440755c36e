"""Run the tests marked `gpu`, or say that there is no GPU and succeed: `make gpu-check`."""

import subprocess
import sys
import time
from pathlib import Path

import torch


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, nothing was checked.")
        return 0
    start = time.perf_counter()
    # An exit status of 5, no test collected, stays a failure: a check that checks nothing must not pass on a GPU.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--durations=5"]
    status = subprocess.run(command, cwd=Path(__file__).parents[1]).returncode
    seconds = time.perf_counter() - start
    print(f"gpu-check: exit status {status} after {seconds:.1f} s on {torch.cuda.get_device_name()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
