"""``costs``: memory and time of each method, beside the paper's formulas."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from examples.paper.commands.run import MethodName, ProblemName
from examples.paper.defaults import frequencies
from workloads import environment, records
from workloads.bench import Bench
from workloads.cost_formulas import Frequencies, multiplications, state_numbers
from workloads.layer_sizes import layer_sizes
from workloads.methods import METHODS
from workloads.workload import Workload, of_model, of_problem


@dataclass(frozen=True)
class CostsRun:
    """Measure state and time by part of each method, and print them beside table_4 and table_5. Needs no data.

    Example: python -m examples.paper costs --problems vgg16-cifar10 resnet32-cifar10 --steps 40
    """

    problems: tuple[ProblemName, ...] = ()
    """Networks, with their problem's batch size and the paper's T."""
    model: str | None = None
    """Any other classifier, as MODULE:FUNCTION, for example torchvision.models:resnet18."""
    input_shape: tuple[int, ...] = (3, 32, 32)
    """Shape of one input of --model."""
    classes: int = 10
    """Number of classes: labels for --model are 0 to CLASSES - 1."""
    methods: tuple[MethodName, ...] = ("kbfgs", "kbfgsl", "kfac", "adam", "sgdm")
    """The methods."""
    batch_size: int | None = None
    """m, if it is not the problem's."""
    update_freq: int | None = None
    """T, for KFAC T₂, if it is not the paper's."""
    stats_update_freq: int | None = None
    """KFAC's T₁."""
    repeats: int = 5
    """Measure each part so many times; the median counts."""
    steps: int = 0
    """Also time so many whole iterations, and give their ratio to SGD-m's. A multiple of T is fair."""
    out: Path = Path("runs/costs.jsonl")
    """File of JSON lines; `report` takes it. Lines are added."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: int = 0
    """Threads of torch; 0 for its own choice."""

    def main(self) -> None:
        from examples.paper.costs import render_costs  # with pandas, which takes its time

        environment.prepare(self.threads)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        jobs = [(w, method, p) for w, p in self._workloads() for method in self.methods]
        if not jobs:
            raise SystemExit("Name --problems, or a --model.")
        for workload, method, problem in (bar := tqdm(jobs)):
            bar.set_description(f"{workload.name}, {METHODS[method].title}")
            records.append(self.out, self._measure(workload, method, problem, torch.device(name)))
        Console().print(Markdown(render_costs(self.out)))

    def _workloads(self) -> list[tuple[Workload, str]]:
        found = [(of_problem(name, self.batch_size), name) for name in self.problems]
        if self.model is not None:
            found.append((of_model(self.model, self.input_shape, self.classes, self.batch_size), "vgg16-cifar10"))
        return found

    def _measure(self, workload: Workload, method: str, problem: str, device: torch.device) -> dict[str, Any]:
        theirs = frequencies(problem, method)
        freq = Frequencies(
            T=self.update_freq or theirs.get("update_freq") or 1,
            T1=self.stats_update_freq or theirs.get("stats_update_freq") or 1,
        )
        bench = Bench(workload, method, freq, device)
        layers = layer_sizes(bench.model, workload.data(device)[0][:2])
        costs = bench.measure(self.repeats, self.steps)
        return {
            "kind": "costs",
            "workload": workload.name,
            "batch_size": workload.batch_size,
            "method": method,
            **asdict(freq),
            **asdict(costs),
            "steps": self.steps,
            "state_formula": state_numbers(method, layers),
            "multiplications": multiplications(method, layers, workload.batch_size, freq),
            **environment.origin("examples.paper", device),
        }
