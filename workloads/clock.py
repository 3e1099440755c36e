"""Seconds, in which what others do on the machine counts as little as it can."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds: this process's own where it runs in one thread of a CPU, and the wall clock's elsewhere.

    Those of a process are the sum of its threads', and do not count a GPU's work, for which this waits.
    """
    wait(device)
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def wait(device: torch.device) -> None:
    """Until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
