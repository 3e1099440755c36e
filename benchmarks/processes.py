"""What several processes send for a curvature update, and what it takes: ``python -m benchmarks.processes``.

Two processes under gloo train one network with an eighth of the usual minibatch each; how much is sent does not depend
on that. Beside what was counted stand the formula, the gradient that is sent at every step anyway, and what KFAC's
factors take. Times are medians of steps in which curvature is due and of others, as ratios to SGD's step in the same
processes. The last columns are what a model of latency and bandwidth says for many ranks: both are measured by the same
run, so they are those of processes that share a machine.
"""

import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import options
from benchmarks.problems import PROBLEMS, QUICK, set_up
from benchmarks.report import markdown
from kfqn_ext.optim import KBFGS
from kfqn_ext.optim.passes.ranks import SeveralProcesses
from workloads.objective import minibatch

RANKS, SHARE = 2, 8
LARGE = 1 << 22  # numbers of the message that tells the bandwidth
MANY = (16, 256, 4096)


def work(rank: int, problems: list[str], quick: bool, steps: int, folder: str) -> None:
    """One rank: measure everything, and let the first write it down."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=600)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit
    )
    found: dict[str, Any] = {"latency": latency(), "bandwidth": bandwidth(), "problems": {}}
    for name in problems:
        found["problems"][name] = measure(name, quick, steps)
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def latency() -> float:
    """Seconds of an all-reduce of one number."""
    return all_reduce(torch.zeros(1), 200)


def bandwidth() -> float:
    """Bytes a second of an all-reduce of many numbers."""
    return 4 * LARGE / all_reduce(torch.zeros(LARGE), 7)


def all_reduce(tensor: Tensor, turns: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        return time.perf_counter() - start

    return median(once() for _ in range(turns))


def measure(name: str, quick: bool, steps: int) -> dict[str, Any]:
    """Bytes and messages of an update, and seconds of steps."""
    setup = set_up((QUICK if quick else PROBLEMS)[name], torch.device("cpu"))
    size = max(1, len(setup.x) // SHARE)
    x, y = setup.x[:size], setup.y[:size]

    def run(build: Callable[[nn.Module], Any], number: int) -> tuple[Any, list[float], list[tuple[int, int]]]:
        model = DistributedDataParallel(set_up((QUICK if quick else PROBLEMS)[name], torch.device("cpu")).model)
        optimizer, seconds, sent = build(model), [], []
        ranks = optimizer._passes.ranks if hasattr(optimizer, "_passes") else None
        for _ in range(number):
            before = counts(ranks)
            start = time.perf_counter()
            optimizer.step(minibatch(model, setup.workload.loss, x, y))
            seconds.append(time.perf_counter() - start)
            sent.append(tuple(b - a for a, b in zip(before, counts(ranks), strict=True)))
        return optimizer, seconds, sent

    sgd = run(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), steps)[1]
    ours, due, sent = run(lambda model: KBFGS.as_printed(model, lr=1e-4, curvature_update_freq=1), steps)
    idle = run(lambda model: KBFGS.as_printed(model, lr=1e-4, curvature_update_freq=10**6), steps)[1]
    states = [state for state in ours.state.values() if "H_A" in state]
    shapes = [(state["momentum"].shape, bool(state["pairs_seen_G"].any())) for state in states]
    sizes = [(prod(shape[:-2]) * shape[-1], prod(shape[:-2]) * shape[-2], learns) for shape, learns in shapes]
    return {
        "gradient": 4 * sum(p.numel() for p in setup.model.parameters()),
        "sent": sent[-1][0],
        "messages": sent[-1][1],
        "formula": 4 * sum(2 * d_in + (5 * d_out if learns else 0) for d_in, d_out, learns in sizes),
        "kfac": 4 * sum(s[-1] ** 2 * prod(s[:-2]) + s[-2] ** 2 * prod(s[:-2]) for s, _ in shapes),
        "sgd": median(sgd[2:]),
        "due": median(due[2:]),
        "idle": median(idle[2:]),
    }


def prod(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def counts(ranks: SeveralProcesses | None) -> tuple[int, int]:
    return (0, 0) if ranks is None else (ranks.bytes_sent, ranks.messages)


def predicted(found: dict[str, Any], problem: dict[str, Any], ranks: int) -> float:
    """Seconds of an update's messages, by a ring of some ranks: 2 (R - 1) hops of a share each."""
    hops = 2 * (ranks - 1)
    here = 2 * (RANKS - 1)
    return float(
        problem["messages"] * found["latency"] * hops / here
        + problem["sent"] / found["bandwidth"] * (hops / ranks) / (here / RANKS)
    )


def render(results: dict[str, Any]) -> str:
    """Two tables."""
    found = results["found"]
    sent = [
        [
            "",
            "gradient, MB",
            "K-BFGS, kB",
            "formula, kB",
            "messages",
            "KFAC's factors, MB",
            "K-BFGS ÷ gradient at T = 20",
        ]
    ]
    times = [["", "step without update ÷ SGD's", "with update ÷ SGD's", *(f"messages, {r} ranks, ms" for r in MANY)]]
    for name, p in found["problems"].items():
        sent.append(
            [
                name,
                f"{p['gradient'] / 1e6:.2f}",
                f"{p['sent'] / 1e3:.1f}",
                f"{p['formula'] / 1e3:.1f}",
                str(p["messages"]),
                f"{p['kfac'] / 1e6:.1f}",
                f"{p['sent'] / 20 / p['gradient']:.2%}",
            ]
        )
        predictions = [f"{1e3 * predicted(found, p, ranks):.1f}" for ranks in MANY]
        times.append([name, f"{p['idle'] / p['sgd']:.2f}", f"{p['due'] / p['sgd']:.2f}", *predictions])
    latency, rate = f"{1e3 * found['latency']:.2f} ms", f"{found['bandwidth'] / 1e6:.0f} MB/s"
    speed = f"An all-reduce takes {latency} and {rate} in {RANKS} processes here."
    return "\n\n".join([markdown(sent), markdown(times), speed, f"`{results['command']}`"])


def main() -> None:
    parser = options.plain(__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which ones")
    parser.add_argument("--steps", type=int, default=9, help="of each optimizer; the first two do not count")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs")
    options.add_outputs(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args.problem, args.quick, args.steps, folder), nprocs=RANKS)
        found = torch.load(Path(folder, "found.pt"), weights_only=True)
    options.finish(args, "processes", torch.device("cpu"), {"quick": args.quick, "found": found}, render)


if __name__ == "__main__":
    sys.exit(main())
