"""Operations of a step, as a GPU would launch them: ``python -m benchmarks.launches``.

Each operation that torch is asked for counts, but for views: on a GPU it is a kernel, or a few. They are counted on a
CPU, at the paper's networks and minibatches, with the ways to A and A s that a GPU takes, and as if no number could be
looked at. What is done for many tensors at once counts once.

Beside them is a model of a step on a GPU. Its time is the sum of three: launches times the time of one, bytes of all
arguments and results over the bandwidth, multiplications over the rate. No GPU was measured for it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from tqdm import tqdm

from benchmarks import options
from benchmarks.contenders import CONTENDERS, every
from benchmarks.parts import DIRECTIONS, LEARNING, MEASURING, MOVES, PASSES, REST, SECOND, told_apart
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from benchmarks.ready import Ready
from benchmarks.report import markdown
from benchmarks.turns import Run, prepare
from kfqn_ext.geometry import conv
from kfqn_ext.linalg import low_rank
from kfqn_ext.optim import gate
from workloads.operations import Load, Operations

# Of an H100 SXM by its data sheet: bytes a second, and float32 operations a second outside of the tensor cores. The
# seconds that torch takes to launch a kernel from Python are an assumption.
LAUNCH, BANDWIDTH, RATE = 5e-6, 3.35e12, 67e12
BASE = "SGD-m"
OPTIMIZERS: dict[str, Callable[[Setup], Ready]] = {
    BASE: CONTENDERS["sgdm"].build,
    "Adam": CONTENDERS["adam"].build,
    "Muon, and AdamW for the rest": CONTENDERS["muon"].build,
    "K-BFGS, one pass": CONTENDERS["onepass"].build,
    "K-BFGS": CONTENDERS["untuned"].build,
    "K-BFGS as printed": CONTENDERS["kbfgs"].build,
}
_KINDS = {"ordinary": "not due", "due": "due"}
_DUE = f", {_KINDS['due']}"
_T = 20
_COLUMNS = {
    "both passes": (PASSES,),
    "second pass": (SECOND,),
    "measuring": (MEASURING,),
    "learning": (LEARNING,),
    "directions": (DIRECTIONS,),
    "moves and rest": (MOVES, REST),
}
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which ones")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs")
    args = parser.parse_args(arguments)
    prepare("cpu")
    problems: dict[str, Any] = {}
    for problem, name in tqdm([(problem, name) for problem in args.problem for name in OPTIMIZERS], leave=False):
        workload = (QUICK if args.quick else PROBLEMS)[problem]
        problems.setdefault(workload.name, {}).update(count(name, set_up(workload, CPU)))
    options.finish(args, "launches", CPU, {"quick": args.quick, "problems": problems}, render)


def count(name: str, setup: Setup) -> dict[str, Any]:
    """Of an optimizer's steps of each kind: the load by part, and what single layers launch of their own by part."""
    with (
        patch.object(conv, "launches_count", lambda x: True),
        patch.object(gate, "is_on_host", lambda t: False),
        patch.object(low_rank, "is_on_host", lambda t: False),
    ):
        steps = OPTIMIZERS[name](setup).steps
        kinds = [kind for kind in _KINDS if kind in steps]
        titles = {kind: f"{name}, {_KINDS[kind]}" if len(kinds) > 1 else name for kind in kinds}
        return {titles[kind]: _of_step(steps[kind], setup.model) for kind in kinds}


def _of_step(step: Run, model: nn.Module) -> dict[str, Any]:
    step()  # the first of its kind makes what later ones find
    operations = Operations()
    with told_apart(operations, model), operations:
        step()
    parts: dict[str, Load] = defaultdict(Load)
    layers: dict[str, dict[str, int]] = defaultdict(dict)
    for (part, layer), load in operations.load.items():
        parts[part] += load
        if layer:
            kind = layers[_kind(model.get_submodule(layer))]
            kind[part] = max(load.launches, kind.get(part, 0))
    return {"parts": {part: asdict(load) for part, load in parts.items()}, "layers": layers}


def _kind(module: nn.Module) -> str:
    """Layers of one kind have weights of one shape."""
    weight: Any = module.weight
    return f"{type(module).__name__} {'×'.join(map(str, weight.shape))}"


# ------------------------------------------------------------------ the page


def render(results: dict[str, Any]) -> str:
    """Launches and the model, a table a network; then what single layers launch."""
    blocks = ["Small networks, to see that it runs."] if results["quick"] else []
    for title, steps in results["problems"].items():
        blocks += [f"{title}:", _of_network(steps)]
    price = f"{1e6 * LAUNCH:g} µs a launch, {1e-12 * BANDWIDTH:g} TB/s, {1e-12 * RATE:g} TFLOP/s"
    blocks.append(f"The four last columns are a model and no measurement, in milliseconds: {price}.")
    blocks += ["Launches of one layer alone, those that are due:", _of_layers(results["problems"])]
    return "\n\n".join(blocks)


def seconds(load: Load) -> tuple[float, float, float]:
    """The model's three times: of launches, of bytes, of multiplications."""
    return load.launches * LAUNCH, load.bytes / BANDWIDTH, load.flops / RATE


def _of_network(steps: Mapping[str, Any]) -> str:
    head = ["launches of a step", *_COLUMNS, "all", "launches", "bytes", "flops", "sum ÷ SGD-m's"]
    totals = {name: sum((Load(**load) for load in step["parts"].values()), Load()) for name, step in steps.items()}
    rows, base = [head], sum(seconds(totals[BASE]))
    for name, step in steps.items():
        parts = {part: load["launches"] for part, load in step["parts"].items()}
        columns = [str(sum(parts.get(part, 0) for part in members) or "") for members in _COLUMNS.values()]
        rows.append([name, *columns, *_model(totals[name].launches, seconds(totals[name]), base)])
        if _is_due(name):
            rows.append([_mean_name(name), *[""] * len(columns), *_mean(totals, name, base)])
    return markdown(rows)


def _model(launches: float, times: Sequence[float], base: float) -> list[str]:
    return [f"{launches:.0f}", *(f"{1e3 * time:.2f}" for time in times), f"{sum(times) / base:.2f}"]


def _mean(totals: Mapping[str, Load], due: str, base: float) -> list[str]:
    """The mean step at T = 20."""
    shares = {_titles(due)[kind]: share for kind, share in every(_T).items()}
    launches = sum(share * totals[name].launches for name, share in shares.items())
    times = [sum(share * seconds(totals[name])[i] for name, share in shares.items()) for i in range(3)]
    return _model(launches, times, base)


def _of_layers(problems: Mapping[str, Any]) -> str:
    """A row a kind of layer: measuring and directions, of each optimizer's due step."""
    due = [name for name in dict.fromkeys(name for steps in problems.values() for name in steps) if _is_due(name)]
    kinds: dict[str, dict[str, int]] = {}
    for steps in problems.values():
        for name in due:
            for kind, parts in steps[name]["layers"].items():
                row = kinds.setdefault(kind, {})
                row[name] = max(row.get(name, 0), sum(parts.values()))
    head = ["weight", *(name.removesuffix(_DUE) for name in due)]
    return markdown([head, *([kind, *(str(row.get(name, "")) for name in due)] for kind, row in kinds.items())])


def _titles(due: str) -> dict[str, str]:
    """By kind, what the steps of the optimizer are called whose due step has this name."""
    return {kind: f"{due.removesuffix(_DUE)}, {title}" for kind, title in _KINDS.items()}


def _mean_name(due: str) -> str:
    return f"{due.removesuffix(_DUE)}, T = {_T}"


def _is_due(name: str) -> bool:
    return name.endswith(_DUE)


if __name__ == "__main__":
    main()
