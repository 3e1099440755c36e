"""Options that every command has that computes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from workloads.data import Data
from workloads.datasets import MissingData
from workloads.problems import PROBLEMS


@dataclass(frozen=True)
class Machine:
    """Where to compute."""

    data_root: Path = Path("data")
    """Directory with the data sets, as torchvision lays them out."""
    download: bool = False
    """Fetch a data set that is missing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: int = 0
    """Threads of torch; 0 for its own choice, shared out among jobs."""

    def torch_device(self) -> torch.device:
        """Where tensors go.

        Raises:
            SystemExit: If there is no GPU where one was asked for.
        """
        gpu = torch.cuda.is_available()
        if self.device == "cuda" and not gpu:
            raise SystemExit("--device cuda: torch sees no GPU that it can use here. Give --device cpu, or auto.")
        return torch.device(("cuda" if gpu else "cpu") if self.device == "auto" else self.device)

    def threads_for(self, jobs: int) -> int:
        """Threads of each of so many processes.

        Raises:
            SystemExit: If the number that was given is none.
        """
        if self.threads < 0:
            raise SystemExit(f"--threads {self.threads}: a process has one or more. Give 1 or more, or 0 for a choice.")
        return self.threads or max(1, torch.get_num_threads() // jobs)

    def load(self, problem: str) -> Data:
        """Read a problem's data.

        Raises:
            SystemExit: With what to do, where they are missing.
        """
        try:
            return PROBLEMS[problem].load(self.data_root, self.download)
        except MissingData as error:
            raise SystemExit(str(error)) from None
