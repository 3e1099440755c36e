"""What a result depends on besides its hyperparameters: machine, versions, threads."""

import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "backpack-for-pytorch", "torchvision", "numpy", "kfqn-ext")


def prepare(threads: int) -> None:
    """Set what holds for the whole process: threads, and subnormal numbers taken for zero.

    torch's Adam lets its averages decay without end where a unit has died. In long runs a CPU then spends its time on
    numbers below 1e-38, and times of optimizers can't be compared.

    Args:
        threads: Of torch; 0 for its own choice.
    """
    torch.set_flush_denormal(True)  # first: threads that torch starts inherit it
    if threads:
        torch.set_num_threads(threads)


def describe(device: torch.device) -> dict[str, Any]:
    """Machine, versions, threads, as a JSON object."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def command(module: str) -> str:
    """The command line of a program of ours, as a person would type it into a shell."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def origin(module: str, device: torch.device) -> dict[str, Any]:
    """What a record says of itself: the command that made it, and the environment."""
    return {"command": command(module), "environment": describe(device)}


def one_line(environment: dict[str, Any]) -> str:
    """An environment for a person."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['processor']}, cores: {environment['cores']}, device: {environment['device']}, "
        f"threads: {environment['threads']}; {environment['system']}, Python {environment['python']}, {versions}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
